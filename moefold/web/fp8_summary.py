"""Statistics of FP8 operands for a report, from a run's fp8.jsonl (observe/fp8_stats.py says what each figure is).

K kinds of operands, F figures, L layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moefold.observe.fp8_stats import FIGURES, OPERAND_KINDS, layer_extremes
from moefold.observe.metrics import Record, iterate_records
from moefold.printable import escape_character
from moefold.web.downsample import DownsampledSeries, SeriesColumn
from moefold.web.page_numbers import MOST_STEPS, JsonObject, rounded_values

MAX_WARNINGS = 200
MAX_LETTERS = 500  # of a warning
LARGEST_FLOAT = 1.7e308


def read_fp8_operands(path: Path, columns: int) -> JsonObject | None:
    """Maps of layers x columns by kind and figure, the worst step of each column; and the warnings with their steps.
    None when nothing was recorded."""
    series = DownsampledSeries(columns)
    layers: list[int] = []
    warnings: list[tuple[int, str]] = []
    for record in iterate_records(path):
        if not is_fp8_record(record):
            continue
        if not series.columns:
            layers = sorted(set(record["layers"]))
        step = record["step"]
        worst_KFL = worst_of_layers(record, layers)
        series.add_step(step, worst_KFL)
        for text in record.get("warnings", []):
            warning = step, warning_text(text)
            warnings.append(warning)
    if not series.columns:
        return None
    maps: JsonObject = {}
    for number, kind in enumerate(OPERAND_KINDS):
        maps[kind] = maps_of_kind(series.columns, number)
    summary: JsonObject = dict(series.column_steps())
    summary["layers"] = layers
    summary["warnings"] = warnings[:MAX_WARNINGS]
    summary["maps"] = maps
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


def maps_of_kind(columns: list[SeriesColumn], kind: int) -> JsonObject:
    maps: JsonObject = {}
    for f, figure in enumerate(FIGURES):
        by_column: list[list[float | None]] = []
        for column in columns:
            worst_KFL = worst_in_column(column, figure)
            worst_L = worst_KFL[kind, f].tolist()
            by_column.append(rounded_values(worst_L))
        maps[figure] = by_column
    return maps


def worst_in_column(column: SeriesColumn, figure: str) -> np.ndarray:
    return column.low if figure == "scale_low" else column.high
