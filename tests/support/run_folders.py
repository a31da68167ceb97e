"""Folders as `moefold train` leaves them, made without training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moefold.config.read import config_as_yaml
from moefold.observe.fp8_stats import OperandSums, ProductOperands, fp8_record
from moefold.observe.router_stats import RouterCounts, RouterLog, balance_summary
from moefold.presets.recipe import resolve_recipe


def load_at(step: int, layer: int, experts: int) -> list[int]:
    """A load that differs by step, layer and expert; expert 1 of layer 1 is dead from step 5 on."""
    dead = layer == 1 and step >= 5
    return [0 if dead and e == 1 else 100 + 7 * step + 10 * layer * e for e in range(experts)]


def run_folder(folder: Path, steps: int = 10, layers: int = 3, experts: int = 4, *more: str) -> Path:
    """A finished run: its configuration, a line of metrics each step, a line of load every second."""
    folder.mkdir(parents=True)
    sizes = ["--model.layers", str(layers + 1), "--model.moe.experts", str(experts), "--model.moe.dense_layers", "1"]
    (folder / "config.yaml").write_text(
        config_as_yaml(resolve_recipe("tiny", [*sizes, "--train.steps", str(steps), *more]))
    )
    log, lines = RouterLog(folder / "router.jsonl", 2, -1), [{"step": 0, "val_loss": 5.5}]
    for step in range(1, steps + 1):
        load = [load_at(step, layer, experts) for layer in range(1, layers + 1)]
        dropped, moved = [step + layer for layer in range(layers)], [1000 * step] * layers
        counts = RouterCounts(list(range(1, layers + 1)), load, dropped, moved)
        log.write(step, counts)
        speed = {"lr": 0.001 * step, "tokens_per_s": 1000.0 + step, "tflops": 0.5, "seconds": 2.0, "memory_gib": 1.5}
        lines.append({"step": step, "loss": 5 - 0.1 * step, "grad_norm": 1 / step, **speed, **balance_summary(counts)})
    log.close()
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def fp8_line(step: int, layers: int, error: float = 0.026) -> dict[str, Any]:
    """A line of fp8.jsonl with two products in each layer, of which the second rounds worse."""
    products: list[ProductOperands] = []
    for layer in range(layers):
        for name, factor in (("attention.out", 1), ("moe.experts.up_product", 2)):
            squares = (error * factor) ** 2
            seen = OperandSums(100.0, 5.0 * factor, squares, 1.0, 0.0, 3.0 + step, 0.5 * factor, -0.25 / factor)
            products.append(ProductOperands(f"blocks.{layer}.{name}", layer, seen, seen, seen))
    return fp8_record(step, products)


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
