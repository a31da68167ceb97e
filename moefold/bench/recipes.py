"""`moefold bench recipes`: the loss of every precision recipe over the same steps of real text, beside plain bf16.

Plain runs with several seeds show how far losses differ anyway. With `--out`, losses are written after each run, and
runs that are there already are not repeated, so that a long comparison can be made in several calls.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import replace
from pathlib import Path
from statistics import mean

from rich.console import Console

from moefold.bench.curves import (
    ByCurve,
    Curves,
    Distances,
    byte_model,
    load_text,
    loss_plot,
    smoke_test_config,
    svg_document,
    training_losses,
)
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import RecipesOptions
from moefold.bench.report import Report, add_number_columns, report_table, show_report
from moefold.config.errors import all_of
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    TrainConfig,
)

COLOURS = ("#111827", "#6b7280", "#d1d5db", "#c2410c", "#1d4ed8", "#15803d", "#a21caf", "#b45309", "#0e7490")
SAME_SEED = "plain, seed 1"  # as the recipes
WINDOW = 25  # steps of the mean that is drawn


def run_benchmark(options: RecipesOptions) -> int:
    report = recipes_report(options)
    if options.out:
        svg = recipes_as_svg(report["losses"])
        (options.out / "recipes.svg").write_text(svg)
    return show_report(report, options.json, print_recipes_report)


def recipe_curves_config(options: RecipesOptions, device: str) -> Config:
    """On a GPU 8 layers of 32 experts, 32,768 bytes of text a step; on a CPU a preset's tiny form, as a smoke test."""
    if device != "cuda":
        return smoke_test_config(device, options.steps)
    attention = AttentionConfig(heads=16, kv_heads=4, head_dim=64, qk_norm="head")
    moe = MoeConfig(experts=32, top_k=4, ffn=512)
    shape = ModelConfig(layers=8, hidden=1024)
    model = byte_model(shape, attention, moe)
    files = options.files or (sysconfig.get_path("stdlib"),)
    data = DataConfig(source="files", files=files, seq_len=1024)
    batch = TrainConfig(global_batch=32, micro_batch=32)
    train = replace(batch, steps=options.steps, device=device)
    optim = OptimConfig(lr=1e-3, warmup=50)
    return Config(name="recipes", model=model, data=data, train=train, optim=optim)


def recipe_variants(config: Config, recipes: list[str], seeds: int) -> dict[str, Config]:
    """Plain runs of several seeds, then each recipe with the first seed."""
    variants: dict[str, Config] = {}
    for seed in range(1, seeds + 1):
        train = replace(config.train, seed=seed)
        variants[f"plain, seed {seed}"] = replace(config, train=train)
    for recipe in recipes:
        precision = replace(config.precision, recipe=recipe)
        variants[recipe] = replace(config, precision=precision)
    return variants


def recipes_report(options: RecipesOptions) -> Report:
    device = resolve_device(options.device)
    recipes = all_of("recipe", options.recipe, RECIPE_SPECS)
    if not recipes:
        specs = RECIPE_SPECS.items()
        recipes = [name for name, spec in specs if spec.quantises]
    config = recipe_curves_config(options, device)
    corpus = load_text(config)
    curves = losses_so_far(options.out)
    report: Report = machine_facts(device)
    report["steps"] = options.steps
    report["losses"] = curves
    variants = recipe_variants(config, recipes, options.seeds)
    for name, variant in variants.items():
        known = curves.get(name, [])
        if len(known) != options.steps:
            curves[name] = training_losses(variant, corpus)
            free_device_memory(device)
        report["summary"] = last_losses(curves)
        if options.out:
            text = json.dumps(report)
            (options.out / "recipes.json").write_text(text)
    return report


def losses_so_far(out: Path | None) -> Curves:
    if out is None:
        return {}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "recipes.json"
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    return report["losses"]


def last_losses(curves: Curves) -> Distances:
    """Mean loss of the last 100 steps, and its distance from the plain run with the same seed, as a share. Other plain
    runs show how far another seed alone moves the loss."""
    summary: Distances = {}
    for name, losses in curves.items():
        last = mean(losses[-100:])
        summary[name] = {"last": last}
    plain = summary[SAME_SEED]["last"]
    for row in summary.values():
        over_plain = row["last"] / plain
        row["from_plain"] = over_plain - 1
    return summary


def print_recipes_report(report: Report) -> None:
    title = f"{report['card']}, {report['date']}: {report['steps']} steps"
    table = report_table(title, "run")
    add_number_columns(table, "last 100 steps", "from plain")
    for name, row in report["summary"].items():
        last = f"{row['last']:.4f}"
        distance = f"{row['from_plain']:+.3%}"
        table.add_row(name, last, distance)
    Console().print(table)


def recipes_as_svg(curves: Curves) -> str:
    """Two plots: the losses, and their differences from the plain run with the same seed; means over some steps."""
    smooth: Curves = {}
    for name, losses in curves.items():
        smooth[name] = moving_mean(losses)
    plain = smooth[SAME_SEED]
    differences: Curves = {}
    for name, losses in smooth.items():
        pairs = zip(losses, plain, strict=True)
        differences[name] = [loss - right for loss, right in pairs]
    colours: ByCurve = dict(zip(curves, COLOURS, strict=False))
    upper = loss_plot(smooth, 20, "loss", colours)
    lower = loss_plot(differences, 320, "loss less that of plain, seed 1", colours)
    titles = {name: name for name in curves}
    return svg_document([upper, lower], titles, colours)


def moving_mean(losses: list[float]) -> list[float]:
    means: list[float] = []
    for end in range(1, len(losses) + 1):
        start = max(0, end - WINDOW)
        window = losses[start:end]
        means.append(mean(window))
    return means
