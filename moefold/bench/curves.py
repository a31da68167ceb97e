"""`moefold bench curves`: loss curves of variants of one configuration, over the same steps on the same text.

`--of kernels`: fast kernels in bf16, references in bf16, references in fp32. The distance of the two bf16 curves from
the fp32 curve is the effect of rounding; that of the fast kernels should be no larger than that of the references.
`--of optimizers`: AdamW with fp32 states, AdamW with 8-bit moments and no main weights, and Muon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import sub
from pathlib import Path
from statistics import mean

from rich.console import Console

from moefold.bench.machine import machine_facts, resolve_device
from moefold.bench.options import CurvesOptions
from moefold.bench.report import Report, add_number_columns, report_table, show_report, tell_progress
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
from moefold.kernels.catalog import CATALOG
from moefold.layout.axes import single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.step import take_next_step

FORCED_REFERENCES = tuple(f"{op}=reference" for op in CATALOG)
Curves = dict[str, list[float]]  # the loss of every step, by variant
Distances = dict[str, dict[str, float]]
ByCurve = dict[str, str]  # a title or a colour
Variants = dict[str, Config]


@dataclass(frozen=True)
class CurveComparison:
    """Variants of a configuration, and the one from which the distance of the others is measured."""

    variants: Callable[[Config], Variants]
    baseline: str
    baseline_title: str
    titles: ByCurve
    colours: ByCurve


def run_benchmark(options: CurvesOptions) -> int:
    device = resolve_device(options.device)
    report = curves_report(device, options.steps, options.of)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        svg = curves_as_svg(report["losses"], COMPARISONS[options.of])
        (options.out / "curves.svg").write_text(svg)
    return show_report(report, options.json, print_curves_report)


def curves_config(device: str, steps: int) -> Config:
    """Small enough for references, large enough for every fast kernel; on a CPU smaller still, as a smoke test."""
    if device != "cuda":
        return smoke_test_config(device, steps)
    attention = AttentionConfig(heads=8, kv_heads=2, head_dim=64, qk_norm="head")
    moe = MoeConfig(experts=16, top_k=4, ffn=512)
    shape = ModelConfig(layers=4, hidden=512)
    model = byte_model(shape, attention, moe)
    data = DataConfig(seq_len=512)
    batch = TrainConfig(global_batch=8, micro_batch=8)
    train = replace(batch, steps=steps, device=device)
    optim = OptimConfig(lr=1e-3, warmup=20)
    return Config(name="curves", model=model, data=data, train=train, optim=optim)


def byte_model(shape: ModelConfig, attention: AttentionConfig, moe: MoeConfig) -> ModelConfig:
    """A model of bytes, whose experts are balanced by a loss."""
    balance = BalanceConfig(aux_loss=0.01)
    balanced = replace(moe, balance=balance)
    return replace(shape, vocab=256, attention=attention, moe=balanced)


def smoke_test_config(device: str, steps: int) -> Config:
    config = PRESETS["qwen3-30b-a3b-tiny"]()
    train = replace(config.train, device=device, steps=steps, global_batch=2)
    return replace(config, train=train)


def load_text(config: Config) -> Corpus:
    vocab = config.model.vocab
    name = choose_tokenizer(config.data, vocab)
    tokenizer = load_tokenizer(name, vocab)
    return load_corpus(config.data, tokenizer, vocab)


def kernel_variants(config: Config) -> Variants:
    bf16 = replace(config.train, precision="bf16")
    fp32 = replace(config.train, precision="fp32")
    references = replace(config.kernels, force=FORCED_REFERENCES)
    reference = replace(config, kernels=references)
    return {
        "fast": replace(config, train=bf16),
        "reference": replace(reference, train=bf16),
        "exact": replace(reference, train=fp32),
    }


def optimizer_variants(config: Config) -> Variants:
    bf16 = replace(config.train, precision="bf16")
    config = replace(config, train=bf16)
    optim = config.optim
    lean = replace(optim, main="none", moments="int8")
    muon = replace(optim, rule="muon")
    lean_muon = replace(muon, main="none", moments="bf16")
    return {
        "adamw": config,
        "adamw_int8": replace(config, optim=lean),
        "muon": replace(config, optim=muon),
        "muon_bf16": replace(config, optim=lean_muon),
    }


COMPARISONS = {
    "kernels": CurveComparison(
        kernel_variants,
        baseline="exact",
        baseline_title="fp32",
        titles={"fast": "fast kernels, bf16", "reference": "references, bf16", "exact": "references, fp32"},
        colours={"fast": "#c2410c", "reference": "#1d4ed8", "exact": "#111827"},
    ),
    "optimizers": CurveComparison(
        optimizer_variants,
        baseline="adamw",
        baseline_title="AdamW",
        titles={
            "adamw": "AdamW, fp32 states",
            "adamw_int8": "AdamW, int8 moments",
            "muon": "Muon, fp32 states",
            "muon_bf16": "Muon, bf16 momentum",
        },
        colours={"adamw": "#111827", "adamw_int8": "#6b7280", "muon": "#c2410c", "muon_bf16": "#1d4ed8"},
    ),
}


def training_losses(config: Config, corpus: Corpus) -> list[float]:
    train = config.train
    world = single_rank_world(train.device)
    run = assemble_run(config, world, Path("."), corpus)
    reports = [take_next_step(run) for _ in range(train.steps)]
    run.gradients.remove_hooks()
    return [report.loss for report in reports]


def curves_report(device: str, steps: int, of: str) -> Report:
    comparison = COMPARISONS[of]
    config = curves_config(device, steps)
    corpus = load_text(config)
    curves: Curves = {}
    for name, variant in comparison.variants(config).items():
        tell_progress(comparison.titles[name])
        curves[name] = training_losses(variant, corpus)
    return {
        **machine_facts(device),
        "of": of,
        "steps": steps,
        "model": config.name,
        "losses": curves,
        "summary": loss_distances(curves, comparison.baseline),
    }


def loss_distances(curves: Curves, baseline: str) -> Distances:
    """By variant: the mean loss of the last tenth, and the mean and largest distance from the baseline's curve."""
    distances: Distances = {}
    for name, losses in curves.items():
        differences = differences_from(curves[baseline], losses)
        apart = list(map(abs, differences))
        tenth = max(1, len(losses) // 10)
        last = losses[-tenth:]
        distances[name] = {
            "last": mean(last),
            "strays": mean(apart),
            "at_most": max(apart),
        }
    return distances


def differences_from(baseline: list[float], losses: list[float]) -> list[float]:
    return list(map(sub, losses, baseline))


def print_curves_report(report: Report) -> None:
    comparison = COMPARISONS[report.get("of", "kernels")]  # earlier reports compare kernels
    title = f"{report['card']}, {report['date']}: {report['steps']} steps of Python's own library"
    table = report_table(title, "run")
    add_number_columns(table, "last tenth", f"strays from {comparison.baseline_title}", "at most")
    for name, row in report["summary"].items():
        cells = [f"{figure:.4f}" for figure in row.values()]
        table.add_row(comparison.titles[name], *cells)
    Console().print(table)


@dataclass(frozen=True)
class LossPanel:
    """Axes of one plot: steps to x, losses to y, in pixels of the SVG."""

    top: float
    low: float
    high: float
    steps: int
    left: float = 80
    width: float = 640
    height: float = 230

    @property
    def span(self) -> float:
        return (self.high - self.low) or 1.0

    def step_to_x(self, step: int) -> float:
        share = step / (self.steps - 1)
        return self.left + self.width * share

    def loss_to_y(self, loss: float) -> float:
        share = (self.high - loss) / self.span
        return self.top + 20 + self.height * share


def curves_as_svg(curves: Curves, comparison: CurveComparison) -> str:
    """Two plots in one SVG: the losses, and the differences of the other curves from the baseline's."""
    baseline = curves[comparison.baseline]
    differences: Curves = {}
    for name, losses in curves.items():
        if name != comparison.baseline:
            differences[name] = differences_from(baseline, losses)
    colours = comparison.colours
    upper = loss_plot(curves, 20, "loss", colours)
    lower = loss_plot(differences, 320, f"loss less that of {comparison.baseline_title}", colours)
    return svg_document([upper, lower], comparison.titles, colours)


def svg_document(plots: list[str], titles: ByCurve, colours: ByCurve) -> str:
    """Plots one above the other, and the legend at the bottom."""
    frame = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 640" font-family="sans-serif" font-size="12">'
    background = '<rect width="760" height="640" fill="white"/>'
    legend = curve_legend(titles, colours)
    parts = [frame, background, *plots, *legend, "</svg>\n"]
    return "\n".join(parts)


def curve_legend(titles: ByCurve, colours: ByCurve) -> list[str]:
    """Four entries to a line."""
    parts: list[str] = []
    entries = enumerate(titles.items())
    for number, (name, title) in entries:
        x = 90 + 170 * (number % 4)
        y = 612 + 18 * (number // 4)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colours[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{title}</text>')
    return parts


def loss_plot(curves: Curves, top: float, title: str, colours: ByCurve) -> str:
    series = curves.values()
    values = list(chain.from_iterable(series))
    steps = max(2, *map(len, series))
    lowest = min(values)
    highest = max(values)
    panel = LossPanel(top, lowest, highest, steps)
    heading = f'<text x="{panel.left}" y="{top + 8}" font-weight="bold">{title}</text>'
    parts = [heading]
    parts += loss_axis(panel)
    parts += step_axis(panel)
    for name, losses in curves.items():
        line = loss_polyline(losses, colours[name], panel)
        parts.append(line)
    return "\n".join(parts)


def loss_axis(panel: LossPanel) -> list[str]:
    """Five horizontal grid lines with their losses."""
    parts: list[str] = []
    right = panel.left + panel.width
    for quarter in range(5):
        value = panel.low + panel.span * quarter / 4
        y = panel.loss_to_y(value)
        parts.append(f'<line x1="{panel.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{panel.left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    return parts


def step_axis(panel: LossPanel) -> list[str]:
    parts: list[str] = []
    y = panel.top + panel.height + 38
    quarter = max(1, panel.steps // 4)
    for step in range(0, panel.steps, quarter):
        x = panel.step_to_x(step)
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>')
    return parts


def loss_polyline(losses: Sequence[float], colour: str, panel: LossPanel) -> str:
    points: list[str] = []
    for step, loss in enumerate(losses):
        x = panel.step_to_x(step)
        y = panel.loss_to_y(loss)
        points.append(f"{x:.1f},{y:.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
