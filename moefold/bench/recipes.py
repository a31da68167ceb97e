"""`moefold bench recipes`: losses of precision recipes, and of parts of them, beside bf16, over the same steps of real
text and with several seeds.

The judge is the loss on held-out text after the last step. With `--out` each run is written when it is done, and runs
that are there already are not repeated: a comparison can be made in several calls, also by processes side by side,
each with its variants or seeds. The last call reports on all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from statistics import mean

from rich.console import Console

from moefold.bench.curves import ByCurve, Curves, load_text, loss_plot, svg_document
from moefold.bench.formats import VARIANTS
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import RecipesOptions
from moefold.bench.recipe_runs import (
    PLAIN,
    RecipeRun,
    compared_model,
    recipe_run,
    replace_file,
    save_run,
    saved_runs,
)
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.config.errors import all_of
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import Config

COLOURS = (
    *("#111827", "#c2410c", "#1d4ed8"),
    *("#15803d", "#a21caf", "#b45309"),
    *("#0e7490", "#6b7280", "#9f1239"),
    *("#4d7c0f", "#7c3aed", "#0369a1"),
    *("#d97706", "#059669", "#db2777"),
    *("#64748b", "#7f1d1d"),
)
WINDOW = 25  # steps of the mean that is drawn
CAPTION = (
    "held out: mean over the seeds of the loss on text that was not trained on. spread: of the seeds, highest less "
    "lowest as a share. from bf16: mean over the seeds of the distance from the run in bf16 with the same seed; "
    "furthest: of one seed. plain: parameters of linear layers that stay in bf16. ms: median step."
)
ByVariant = dict[str, list[RecipeRun]]


def run_benchmark(options: RecipesOptions) -> int:
    report = recipes_report(options)
    if options.out:
        text = json.dumps(report)
        replace_file(options.out / "recipes.json", text)
        svg = recipes_as_svg(report["losses"])
        replace_file(options.out / "recipes.svg", svg)
    return show_report(report, options.json, print_recipes_report)


def chosen_variants(options: RecipesOptions) -> list[str]:
    """bf16 and all recipes, unless some variants are named."""
    named = all_of("variant", options.variant, VARIANTS)
    recipes = [name for name, spec in RECIPE_SPECS.items() if spec.quantises]
    return named or [PLAIN, *recipes]


def recipes_report(options: RecipesOptions) -> Report:
    device = resolve_device(options.device)
    variants = chosen_variants(options)
    config = compared_model(options, device)
    runs = list(measured_runs(options, config, variants))
    if options.out:
        runs = list(saved_runs(options.out, config))
    by_variant = runs_by_variant(runs)
    report: Report = machine_facts(device)
    report["steps"] = config.train.steps
    report["losses"] = {name: mean_curve(found) for name, found in by_variant.items()}
    report["results"] = [variant_row(name, by_variant) for name in by_variant]
    return report


def measured_runs(options: RecipesOptions, config: Config, variants: list[str]) -> Iterable[RecipeRun]:
    """Those of this call that are not there yet."""
    corpus = load_text(config)
    known = list(saved_runs(options.out, config)) if options.out else []
    done = {(run.variant, run.seed) for run in known}
    for variant in variants:
        for seed in options.seed:
            if (variant, seed) in done:
                continue
            run = recipe_run(config, variant, seed, corpus)
            tell_progress(f"{variant}, seed {seed}: {run.held_out:.4f} held out, {run.milliseconds:.1f} ms a step")
            if options.out:
                save_run(options.out, run)
            free_device_memory(config.train.device)
            yield run


def runs_by_variant(runs: list[RecipeRun]) -> ByVariant:
    """In the order of the table of variants."""
    by_variant: ByVariant = {}
    for name in VARIANTS:
        found = [run for run in runs if run.variant == name]
        if found:
            by_variant[name] = found
    return by_variant


def variant_row(name: str, by_variant: ByVariant) -> Row:
    """`from_plain`: the mean distance from plain runs of the same seeds, as a share; None without such runs."""
    runs = by_variant[name]
    held_out = [run.held_out for run in runs]
    average = mean(held_out)
    distances = seed_distances(runs, by_variant.get(PLAIN, []))
    return {
        "variant": name,
        "seeds": {run.seed: run.held_out for run in runs},
        "held_out": average,
        "spread": (max(held_out) - min(held_out)) / average,
        "from_plain": mean(distances) if distances else None,
        "furthest": max(distances, key=abs) if distances else None,
        "last": mean(run.last for run in runs),
        "plain_share": runs[0].plain_share,
        "milliseconds": mean(run.milliseconds for run in runs),
    }


def seed_distances(runs: list[RecipeRun], plain: list[RecipeRun]) -> list[float]:
    """Of each run from the plain one with its seed, where there is one."""
    right_of = {run.seed: run.held_out for run in plain}
    distances: list[float] = []
    for run in runs:
        right = right_of.get(run.seed)
        if right is not None:
            distances.append(run.held_out / right - 1)
    return distances


def print_recipes_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(f"{heading}: {report['steps']} steps", "run", caption=CAPTION)
    add_number_columns(table, "seeds", "held out", "spread", "from bf16", "furthest", "plain", "ms")
    for row in report["results"]:
        seeds = str(len(row["seeds"]))
        held_out = f"{row['held_out']:.4f}"
        spread = f"{row['spread']:.2%}"
        distances = [share_text(row["from_plain"]), share_text(row["furthest"])]
        share = f"{row['plain_share']:.1%}"
        table.add_row(row["variant"], seeds, held_out, spread, *distances, share, f"{row['milliseconds']:.1f}")
    Console().print(table)


def share_text(share: float | None) -> str:
    return "" if share is None else f"{share:+.2%}"


def mean_curve(runs: list[RecipeRun]) -> list[float]:
    """The mean over seeds of each step's loss."""
    curves = [run.losses for run in runs]
    return [mean(losses) for losses in zip(*curves, strict=True)]


def recipes_as_svg(curves: Curves) -> str:
    """Two plots: the losses, and their differences from those in bf16; means over seeds and some steps."""
    smooth: Curves = {}
    for name, losses in curves.items():
        smooth[name] = moving_mean(losses)
    first = next(iter(smooth))
    plain = smooth.get(PLAIN, smooth[first])
    differences: Curves = {}
    for name, losses in smooth.items():
        pairs = zip(losses, plain, strict=True)
        differences[name] = [loss - right for loss, right in pairs]
    colours: ByCurve = dict(zip(curves, COLOURS, strict=False))
    upper = loss_plot(smooth, 20, "loss", colours)
    lower = loss_plot(differences, 320, "loss less that of bf16", colours)
    titles = {name: name for name in curves}
    return svg_document([upper, lower], titles, colours)


def moving_mean(losses: list[float]) -> list[float]:
    means: list[float] = []
    for end in range(1, len(losses) + 1):
        start = max(0, end - WINDOW)
        window = losses[start:end]
        means.append(mean(window))
    return means
