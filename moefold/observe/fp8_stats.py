"""FP8 statistics: figures of every product's operands at recorded steps, and warnings of layers whose FP8 error grows.

    amax         largest magnitude
    error        |x - its FP8 copy| / |x|, over all values of the operand
    underflow    share of the values other than zero that become zero
    saturated    share of them that are beyond the range of their scale, which delayed scales alone allow
    scale_low, scale_high    the smallest and the largest scale of a value other than zero

The rule of the warning: the mean of an operand's error over the last WINDOW recorded steps is above GROWTH times the
lowest such mean so far, and above LEVELS["error"]; or the same of its underflow. One warning for each layer.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Literal, NamedTuple

from moefold.observe.metrics import JsonLines, MetricsSink, Record, iterate_records

OperandKind = Literal["activation", "gradient", "weight"]
OPERAND_KINDS: tuple[OperandKind, ...] = ("activation", "gradient", "weight")
FIGURES = ("amax", "error", "underflow", "saturated", "scale_low", "scale_high")
WINDOW = 5  # recorded steps of a mean
GROWTH = 1.5
LEVELS = {"error": 0.04, "underflow": 0.05}  # values that fit their scales have an error of about 0.026 in E4M3
WRITTEN_DIGITS = 6

Figures = dict[str, float | None]  # None: the operand had no value, or one that is not finite


class OperandSums(NamedTuple):
    """What one operand of a product came to in a step, over all ranks: numbers and sums of squares over its values
    other than zero, and extremes; minus infinity where there was no value."""

    values: float
    underflowed: float
    squared_error: float
    squares: float
    saturated: float
    amax: float
    scale_high: float
    negated_scale_low: float

    def figures(self) -> Figures:
        if not self.values:
            return dict.fromkeys(FIGURES)
        error = math.nan
        if self.squares:
            error = self.squared_error / self.squares
        found = {
            "amax": self.amax,
            "error": math.sqrt(error),
            "underflow": self.underflowed / self.values,
            "saturated": self.saturated / self.values,
            "scale_low": -self.negated_scale_low,
            "scale_high": self.scale_high,
        }
        return {name: rounded(value) for name, value in found.items()}


class ProductOperands(NamedTuple):
    """The operands of one product, or of several that read one input. `layer`: its number in the model."""

    product: str
    layer: int
    activation: OperandSums
    gradient: OperandSums
    weight: OperandSums


def rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return float(f"{value:.{WRITTEN_DIGITS}g}")


def fp8_record(step: int, products: Sequence[ProductOperands]) -> Record:
    """A line of fp8.jsonl: for each kind of operand and each figure, a list with one entry for each product."""
    record: Record = {"step": step}
    record["products"] = [each.product for each in products]
    record["layers"] = [each.layer for each in products]
    for kind in OPERAND_KINDS:
        operands: list[OperandSums] = [getattr(each, kind) for each in products]
        found = [operand.figures() for operand in operands]
        by_figure: dict[str, list[float | None]] = {}
        for name in FIGURES:
            by_figure[name] = [figures[name] for figures in found]
        record[kind] = by_figure
    return record


def layer_extremes(record: Record, kind: str, figure: str) -> dict[int, float]:
    """The worst product of each layer: the lowest of `scale_low`, the highest of all others."""
    worse = min if figure == "scale_low" else max
    layers = record["layers"]
    values = record[kind][figure]
    found: dict[int, float] = {}
    for layer, value in zip(layers, values, strict=True):
        if value is not None:
            worst = found.get(layer, value)
            found[layer] = worse(worst, value)
    return found


def layer_curves(record: Record) -> Record:
    """The figures of each layer by the name of their curve in TensorBoard."""
    curves: Record = {"step": record["step"]}
    for kind, figure in product(OPERAND_KINDS, FIGURES):
        extremes = layer_extremes(record, kind, figure)
        for layer, value in extremes.items():
            curves[f"fp8_{kind}_{figure}/layer_{layer}"] = value
    return curves


class Fp8Log:
    """`fp8.jsonl`: one line for each recorded step, with its warnings. Continues a file as JsonLines does, and the
    warnings with it."""

    def __init__(self, path: Path, keep_through: int, curves: MetricsSink | None = None):
        self.lines = JsonLines(path, keep_through)
        self.curves = curves
        self.growth = GrowthWatch()
        for record in iterate_records(path):
            self.growth.look(record)

    def write(self, step: int, products: Sequence[ProductOperands]) -> list[str]:
        """Write a step. Returns its warnings."""
        record = fp8_record(step, products)
        warnings = self.growth.look(record)
        record["warnings"] = warnings
        self.lines.write(record)
        if self.curves:
            curves = layer_curves(record)
            self.curves.write(curves)
        return warnings

    def close(self) -> None:
        self.lines.close()


class FigureKey(NamedTuple):
    """A figure of an operand of a product."""

    product: str
    kind: str
    figure: str


class WatchedFigure:
    """One figure of one operand over recorded steps: the last WINDOW values, and the lowest mean of so many."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.lowest = math.inf

    def grows(self, value: float, level: float) -> bool:
        self.last.append(value)
        if len(self.last) < WINDOW:
            return False
        self.lowest = min(self.lowest, self.mean)
        limit = max(level, GROWTH * self.lowest)
        return self.mean > limit

    @property
    def mean(self) -> float:
        return mean(self.last)


class GrowthWatch:
    """Warns once for each layer that has an operand whose error or underflow grows."""

    def __init__(self) -> None:
        self.figures = defaultdict[FigureKey, WatchedFigure](WatchedFigure)
        self.warned: set[int] = set()

    def look(self, record: Record) -> list[str]:
        """The warnings of a recorded step."""
        warnings: list[str] = []
        for layer, key in self.growing(record):
            if layer not in self.warned:
                self.warned.add(layer)
                warning = self.describe(layer, key)
                warnings.append(warning)
        return warnings

    def growing(self, record: Record) -> Iterator[tuple[int, FigureKey]]:
        layers = record["layers"]
        names = record["products"]
        for kind, (figure, level) in product(OPERAND_KINDS, LEVELS.items()):
            values = record[kind][figure]
            for layer, name, value in zip(layers, names, values, strict=True):
                key = FigureKey(name, kind, figure)
                watched = self.figures[key]
                if value is not None and watched.grows(value, level):
                    yield layer, key

    def describe(self, layer: int, key: FigureKey) -> str:
        watched = self.figures[key]
        blocks, number, *_ = key.product.split(".")
        block = f"{blocks}.{number}"
        return (
            f"warning: the FP8 error of layer {layer} grows: {key.figure} of the {key.kind} of {key.product} is "
            f"{watched.mean:.2%}, and was {watched.lowest:.2%} (means of {WINDOW} recorded steps); "
            f'--precision.recipes "{block}.*: plain" leaves the layer unquantised, and a recipe with more scales, '
            "such as fp8_block, rounds less"
        )
