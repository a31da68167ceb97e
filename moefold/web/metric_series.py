"""Curves and layer maps of a run, from its metrics.jsonl."""

from __future__ import annotations

import numpy as np

from moefold.observe.metrics import Record
from moefold.web.downsample import NOTHING_TOLD, ChangedColumns, DownsampledSeries
from moefold.web.page_numbers import MOST_STEPS, JsonObject, as_float_array, round_significant, rounded_values

GPU_CURVES = ("gpu_watts", "gpu_celsius", "gpu_busy", "gpu_mhz")  # in runs on GPUs
CURVE_METRICS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "tflops", "memory_gib", *GPU_CURVES)
CLONE_CURVES = ("rank_rows", "rank_rows_without")  # of the worst layer, in runs that clone hot experts
DERIVED_CURVES = ("worst_violation", "mean_violation", "elapsed", *CLONE_CURVES)
LAYER_METRICS = ("max_violation", "load_entropy", "dead_experts", "drop_rate", "moved_bytes")
WORST_STEP_METRICS = ("max_violation", "dead_experts")  # a column shows its worst step; of the others, the mean
MAX_CURVE_POINTS = 800  # of a curve


class MetricSeries:
    """Series of a run, filled line by line. `elapsed` is the time of all training steps so far, in seconds."""

    def __init__(self, map_columns: int):
        self.curves: dict[str, DownsampledSeries] = {}
        for name in (*CURVE_METRICS, *DERIVED_CURVES):
            self.curves[name] = DownsampledSeries(MAX_CURVE_POINTS)
        self.maps: dict[str, DownsampledSeries] = {}
        for name in LAYER_METRICS:
            self.maps[name] = DownsampledSeries(map_columns)
        self.last: dict[str, float] = {}
        self.last_step = NOTHING_TOLD
        self.elapsed = 0.0

    def add_record(self, record: Record) -> None:
        """Add one line; values that are no numbers, and steps that do not ascend, are left out."""
        step = record["step"]
        if not self.last_step < step < MOST_STEPS:
            return
        self.last_step = step
        for name, value in self.curve_values(record).items():
            if value is not None and np.isfinite(value):
                series = self.curves[name]
                series.add_step(step, np.asarray(value))
                self.last[name] = float(value)
        for name in LAYER_METRICS:
            value_L = as_float_array(record.get(name), 1)
            if value_L is None:
                continue
            series = self.maps[name]
            series.add_step(step, value_L)
            total = value_L.sum()
            if name == "drop_rate":
                total = value_L.mean()
            self.last[name] = float(total)

    def curve_values(self, record: Record) -> JsonObject:
        """One number for each curve, or None."""
        curves: JsonObject = {}
        for name in CURVE_METRICS:
            value = record.get(name)
            curves[name] = as_float_array(value, 0)
        violation_L = as_float_array(record.get("max_violation"), 1)
        if violation_L is not None:
            curves["worst_violation"] = violation_L.max()
            curves["mean_violation"] = violation_L.mean()
        for name in CLONE_CURVES:
            rows_L = as_float_array(record.get(name), 1)
            if rows_L is not None:
                curves[name] = rows_L.max()
        seconds = as_float_array(record.get("seconds"), 0)
        if seconds is not None and np.isfinite(seconds):
            self.elapsed += max(0.0, float(seconds))
            curves["elapsed"] = self.elapsed
        return curves

    def last_values(self) -> dict[str, float | None]:
        rounded: dict[str, float | None] = {}
        for name, value in self.last.items():
            rounded[name] = round_significant(value)
        return rounded

    def curve_data(self, told: int) -> JsonObject:
        """The curves with a column that has changed since step `told`."""
        curves: JsonObject = {}
        for name, series in self.curves.items():
            changed = series.changed_since(told)
            if changed.columns:
                curves[name] = curve_columns(changed, series.lines_per_column > 1)
        return curves

    def map_data(self, told: int) -> JsonObject:
        maps: JsonObject = {}
        for name, series in self.maps.items():
            changed = series.changed_since(told)
            if changed.columns:
                maps[name] = layer_heatmap(name, changed)
        return maps


def curve_columns(changed: ChangedColumns, are_merged: bool) -> JsonObject:
    """The mean of each column; and, where steps were merged, its minimum and maximum."""
    curve: JsonObject = dict(changed.column_steps())
    means = [column.mean for column in changed.columns]
    curve["mean"] = rounded_values(means)
    if are_merged:
        lows = [column.low for column in changed.columns]
        highs = [column.high for column in changed.columns]
        curve["low"] = rounded_values(lows)
        curve["high"] = rounded_values(highs)
    return curve


def layer_heatmap(name: str, changed: ChangedColumns) -> JsonObject:
    """A value for each layer of each column."""
    heatmap: JsonObject = dict(changed.column_steps())
    values: list[list[float | None]] = []
    for column in changed.columns:
        value_L = column.high if name in WORST_STEP_METRICS else column.mean
        rounded = rounded_values(value_L.tolist())
        values.append(rounded)
    heatmap["values"] = values
    return heatmap
