"""`moefold bench curves`: do fast kernels learn what references learn? The same steps on the same text, three times.

The third run is in fp32 with references alone: how far the two in bf16 stray from it is what rounding does, and fast
kernels should stray no further than references do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from moefold.bench.layer import machine_facts
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
from moefold.data.tokenizer import load_tokenizer
from moefold.kernels.catalog import CATALOG
from moefold.layout.axes import single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.step import train_step

FORCED_REFERENCES = tuple(f"{op}=reference" for op in CATALOG)
CURVE_TITLES = {"fast": "fast kernels, bf16", "reference": "references, bf16", "exact": "references, fp32"}
CURVE_COLOURS = {"fast": "#c2410c", "reference": "#1d4ed8", "exact": "#111827"}


def curves_config(device: str, steps: int) -> Config:
    """Small enough for references, large enough for every fast kernel; on a CPU smaller still, to see that it runs."""
    if device != "cuda":
        config = PRESETS["qwen3-30b-a3b-tiny"]()
        return replace(config, train=replace(config.train, device=device, steps=steps, global_batch=2))
    return Config(
        name="curves",
        model=ModelConfig(
            layers=4,
            hidden=512,
            vocab=256,
            attention=AttentionConfig(heads=8, kv_heads=2, head_dim=64, qk_norm="head"),
            moe=MoeConfig(experts=16, top_k=4, ffn=512, balance=BalanceConfig(aux_loss=0.01)),
        ),
        data=DataConfig(seq_len=512),
        train=TrainConfig(steps=steps, global_batch=8, micro_batch=8, device=device),
        optim=OptimConfig(lr=1e-3, warmup=20),
    )


def kernel_variants(config: Config) -> dict[str, Config]:
    forced = replace(config.kernels, force=FORCED_REFERENCES)
    half, full = (replace(config.train, precision=precision) for precision in ("bf16", "fp32"))
    return {
        "fast": replace(config, train=half),
        "reference": replace(config, train=half, kernels=forced),
        "exact": replace(config, train=full, kernels=forced),
    }


def training_losses(config: Config, corpus: Corpus) -> list[float]:
    run = assemble_run(config, single_rank_world(config.train.device), Path("."), corpus)
    reports = [train_step(run, run.loader.next_batch()) for _ in range(config.train.steps)]
    run.gradients.remove_hooks()
    return [report.loss for report in reports]


def curves_report(device: str, steps: int) -> dict[str, Any]:
    config = curves_config(device, steps)
    corpus = load_corpus(config.data, load_tokenizer(config.data.tokenizer), config.model.vocab)
    curves = {way: training_losses(each, corpus) for way, each in kernel_variants(config).items()}
    return {
        **machine_facts(device),
        "steps": steps,
        "model": config.name,
        "losses": curves,
        "summary": loss_distances(curves),
    }


def loss_distances(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of each way: the mean loss of the last tenth, and how far it strays from fp32, on average and at most."""
    found: dict[str, dict[str, float]] = {}
    for way, losses in curves.items():
        apart = [abs(a - b) for a, b in zip(losses, curves["exact"], strict=True)]
        last = losses[-max(1, len(losses) // 10) :]
        found[way] = {"last": mean(last), "strays": mean(apart), "at_most": max(apart)}
    return found


def print_curves_report(report: dict[str, Any]) -> None:
    title = f"{report['card']}, {report['date']}: {report['steps']} steps of Python's own library"
    table = Table("run", title=title, title_justify="left")
    for column in ("last tenth", "strays from fp32", "at most"):
        table.add_column(column, justify="right")
    for way, row in report["summary"].items():
        table.add_row(CURVE_TITLES[way], f"{row['last']:.4f}", f"{row['strays']:.4f}", f"{row['at_most']:.4f}")
    Console().print(table)


def curves_as_svg(report: dict[str, Any]) -> str:
    """Both pictures as one SVG: the losses, and what the two in bf16 are apart from fp32."""
    curves: dict[str, list[float]] = report["losses"]
    apart = {way: [a - b for a, b in zip(curves[way], curves["exact"], strict=True)] for way in ("fast", "reference")}
    body = [loss_panel_svg(curves, 20, "loss"), loss_panel_svg(apart, 320, "loss less that of fp32")]
    for place, way in enumerate(curves):
        x = 90 + 190 * place
        body.append(f'<line x1="{x}" y1="618" x2="{x + 24}" y2="618" stroke="{CURVE_COLOURS[way]}" stroke-width="2"/>')
        body.append(f'<text x="{x + 30}" y="622">{CURVE_TITLES[way]}</text>')
    frame = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 640" font-family="sans-serif" font-size="12">'
    return "\n".join([frame, '<rect width="760" height="640" fill="white"/>', *body, "</svg>\n"])


def loss_panel_svg(
    curves: dict[str, list[float]], top: float, title: str, width: float = 640, height: float = 230
) -> str:
    values = [value for losses in curves.values() for value in losses]
    low, high = min(values), max(values)
    span, steps = (high - low) or 1.0, max(2, max(map(len, curves.values())))
    x = lambda step: 80 + width * step / (steps - 1)  # noqa: E731
    y = lambda value: top + 20 + height * (high - value) / span  # noqa: E731
    parts = [f'<text x="80" y="{top + 8}" font-weight="bold">{title}</text>']
    for value in [low + span * i / 4 for i in range(5)]:
        parts.append(f'<line x1="80" x2="{80 + width}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="72" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for step in range(0, steps, max(1, steps // 4)):
        parts.append(f'<text x="{x(step):.1f}" y="{top + height + 38}" text-anchor="middle">{step}</text>')
    return "\n".join([*parts, *(loss_polyline_svg(losses, CURVE_COLOURS[way], x, y) for way, losses in curves.items())])


def loss_polyline_svg(losses: Sequence[float], colour: str, x: Any, y: Any) -> str:
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
