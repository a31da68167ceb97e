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
from rich.table import Table

from moefold.bench.curves import Curves, loss_plot, svg_document, training_losses
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import RecipesOptions
from moefold.bench.report import Report, add_number_columns, show_report
from moefold.config.errors import all_of
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import (
    AttentionConfig,
    BalanceConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    TrainConfig,
)
from moefold.data.corpus import Corpus, load_corpus
from moefold.data.tokenizer import choose_tokenizer, load_tokenizer
from moefold.presets.zoo import PRESETS

COLOURS = ("#111827", "#6b7280", "#d1d5db", "#c2410c", "#1d4ed8", "#15803d", "#a21caf", "#b45309")
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
        config = PRESETS["qwen3-30b-a3b-tiny"]()
        train = config.train
        train = replace(train, device=device, steps=options.steps, global_batch=2)
        return replace(config, train=train)
    attention = AttentionConfig(heads=16, kv_heads=4, head_dim=64, qk_norm="head")
    balance = BalanceConfig(aux_loss=0.01)
    moe = MoeConfig(experts=32, top_k=4, ffn=512, balance=balance)
    shape = ModelConfig(layers=8, hidden=1024, vocab=256)
    model = replace(shape, attention=attention, moe=moe)
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
        recipes = [name for name, spec in RECIPE_SPECS.items() if spec.quantises]
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


def load_text(config: Config) -> Corpus:
    vocab = config.model.vocab
    tokenizer = load_tokenizer(choose_tokenizer(config.data, vocab), vocab)
    return load_corpus(config.data, tokenizer, vocab)


def losses_so_far(out: Path | None) -> Curves:
    if out is None:
        return {}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "recipes.json"
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    return report["losses"]


def is_plain(name: str) -> bool:
    return name.startswith("plain")


def last_losses(curves: Curves) -> dict[str, dict[str, float]]:
    """Mean loss of the last 100 steps, and its distance from the mean of the plain runs, as a share."""
    summary: dict[str, dict[str, float]] = {}
    for name, losses in curves.items():
        summary[name] = {"last": mean(losses[-100:])}
    plain_runs = filter(is_plain, curves)
    plain = mean(summary[name]["last"] for name in plain_runs)
    for row in summary.values():
        row["from_plain"] = row["last"] / plain - 1
    return summary


def print_recipes_report(report: Report) -> None:
    title = f"{report['card']}, {report['date']}: {report['steps']} steps"
    table = Table("run", title=title, title_justify="left")
    add_number_columns(table, "last 100 steps", "from plain")
    for name, row in report["summary"].items():
        table.add_row(name, f"{row['last']:.4f}", f"{row['from_plain']:+.3%}")
    Console().print(table)


def recipes_as_svg(curves: Curves) -> str:
    """Two plots: the losses, and their differences from the mean of the plain runs, both as means over some steps."""
    smooth: Curves = {}
    for name, losses in curves.items():
        smooth[name] = moving_mean(losses)
    plain = [smooth[name] for name in filter(is_plain, smooth)]
    steps = zip(*plain, strict=True)
    middle = list(map(mean, steps))
    differences: Curves = {}
    for name, losses in smooth.items():
        pairs = zip(losses, middle, strict=True)
        differences[name] = [loss - right for loss, right in pairs]
    colours: dict[str, str] = dict(zip(curves, COLOURS, strict=False))
    upper = loss_plot(smooth, 20, "loss", colours)
    lower = loss_plot(differences, 320, "loss less the mean of the plain runs", colours)
    titles = {name: name for name in curves}
    return svg_document([upper, lower], titles, colours)


def moving_mean(losses: list[float]) -> list[float]:
    means: list[float] = []
    for end in range(1, len(losses) + 1):
        start = max(0, end - WINDOW)
        means.append(mean(losses[start:end]))
    return means
