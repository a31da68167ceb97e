"""Statistics of FP8 operands for a report, from a run's fp8.jsonl (observe/fp8_stats.py says what each figure is).

K kinds of operands, F figures, L layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moefold.observe.fp8_stats import FIGURES, OPERAND_KINDS, layer_extremes
from moefold.observe.metrics import Record
from moefold.printable import escape_character
from moefold.web.downsample import NOTHING_TOLD, DownsampledSeries, SeriesColumn
from moefold.web.page_numbers import MOST_STEPS, JsonObject, rounded_values

MAX_WARNINGS = 200
MAX_LETTERS = 500  # of a warning
LARGEST_FLOAT = 1.7e308


class Fp8Series:
    """Maps of layers x columns by kind and figure, the worst step of each column; and warnings with their steps."""

    def __init__(self, columns: int):
        self.series = DownsampledSeries(columns)
        self.layers: list[int] = []
        self.warnings: list[tuple[int, str]] = []
        self.last_step = NOTHING_TOLD

    def add_record(self, record: Record) -> None:
        if not is_fp8_record(record):
            return
        if not self.series.columns:
            self.layers = sorted(set(record["layers"]))
        step = record["step"]
        worst_KFL = worst_of_layers(record, self.layers)
        self.series.add_step(step, worst_KFL)
        self.last_step = max(self.last_step, step)
        room = MAX_WARNINGS - len(self.warnings)
        for text in record.get("warnings", [])[:room]:
            warning = step, warning_text(text)
            self.warnings.append(warning)

    def operand_data(self, told: int) -> JsonObject | None:
        """The columns that have changed since step `told`, and all warnings; None when there is no column."""
        changed = self.series.changed_since(told)
        if not changed.columns:
            return None
        summary: JsonObject = dict(changed.column_steps())
        summary["layers"] = self.layers
        summary["warnings"] = self.warnings
        summary["values"] = [figures_of_column(column) for column in changed.columns]
        return summary


def warning_text(text: Any) -> str:
    told = str(text).removeprefix("warning: ")
    shown = told[:MAX_LETTERS]
    return "".join(map(escape_character, shown))


def is_fp8_record(record: Record) -> bool:
    """Whether a line has a number or null for every figure of every product."""
    layers = record.get("layers")
    warnings = record.get("warnings", [])
    is_step = 0 <= record["step"] < MOST_STEPS
    if not is_step or not isinstance(warnings, list):
        return False
    if not is_list(layers, int) or not layers:
        return False
    products = len(layers)
    return all(has_figures(record.get(kind), products) for kind in OPERAND_KINDS)


def has_figures(by_name: Any, products: int) -> bool:
    if not isinstance(by_name, dict):
        return False
    for name in FIGURES:
        values: Any = by_name.get(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not is_list(values, int | float | None):
            return False
        if len(values) != products:
            return False
    return True


def is_list(values: Any, kind: Any) -> bool:
    """Whether it is a list of such entries, none of them beyond the range of a float."""
    if not isinstance(values, list):
        return False
    entries: list[Any] = values
    return all(isinstance(x, kind) and is_in_range(x) for x in entries)


def is_in_range(x: float | None) -> bool:
    return x is None or not abs(x) > LARGEST_FLOAT


def worst_of_layers(record: Record, layers: list[int]) -> np.ndarray:
    """(K, F, L); not a number where a layer has no value."""
    shape = len(OPERAND_KINDS), len(FIGURES), len(layers)
    found_KFL = np.full(shape, np.nan)
    for k, kind in enumerate(OPERAND_KINDS):
        for f, figure in enumerate(FIGURES):
            worst = layer_extremes(record, kind, figure)
            found_KFL[k, f] = [worst.get(layer, np.nan) for layer in layers]
    return found_KFL


def figures_of_column(column: SeriesColumn) -> JsonObject:
    """The worst value of each layer, by kind of operand and figure."""
    by_kind: JsonObject = {}
    for k, kind in enumerate(OPERAND_KINDS):
        figures: JsonObject = {}
        for f, figure in enumerate(FIGURES):
            worst_KFL = worst_in_column(column, figure)
            worst_L = worst_KFL[k, f].tolist()
            figures[figure] = rounded_values(worst_L)
        by_kind[kind] = figures
    return by_kind


def worst_in_column(column: SeriesColumn, figure: str) -> np.ndarray:
    return column.low if figure == "scale_low" else column.high
