"""The load of layers x experts x steps, from a run's router.jsonl, one byte each."""

from __future__ import annotations

import base64

import numpy as np

from moefold.observe.metrics import Record
from moefold.web.downsample import NOTHING_TOLD, DownsampledSeries
from moefold.web.page_numbers import MOST_STEPS, JsonObject, as_float_array, round_significant

MAX_LOAD_COLUMNS = 400
CODE_NONE = 0  # code of an expert that got no token
CODE_UNKNOWN = 255  # code of an expert that was not measured
HIGHEST_CODE = 254


class LoadSeries:
    """The load as multiples of the even share, in as many columns as `cells` loads allow."""

    def __init__(self, cells: int):
        self.cells = cells
        self.series: DownsampledSeries | None = None
        self.layers: list[int] = []
        self.experts = 0
        self.last_step = NOTHING_TOLD

    def add_record(self, record: Record) -> None:
        load_LE = as_float_array(record.get("load"), 2)
        step = record["step"]
        if load_LE is None or not 0 <= step < MOST_STEPS:
            return
        if self.series is None:
            columns = min(MAX_LOAD_COLUMNS, self.cells // load_LE.size)
            self.series = DownsampledSeries(columns)
            self.layers = logged_layer_numbers(record, len(load_LE))
            self.experts = load_LE.shape[1]
        self.series.add_step(step, even_share_multiples(load_LE))
        self.last_step = max(self.last_step, step)

    def load_data(self, told: int) -> JsonObject | None:
        """The columns that have changed since step `told`, coded; None when there is none."""
        if self.series is None:
            return None
        changed = self.series.changed_since(told)
        if not changed.columns:
            return None
        load: JsonObject = dict(changed.column_steps())
        load["layers"] = self.layers
        load["experts"] = self.experts
        coded = [encode_log_bytes(column.mean) for column in changed.columns]
        load["low"] = [round_significant(low) for low, _, _ in coded]
        load["high"] = [round_significant(high) for _, high, _ in coded]
        load["codes"] = [base64.b64encode(codes.tobytes()).decode() for _, _, codes in coded]
        return load


def even_share_multiples(load_LE: np.ndarray) -> np.ndarray:
    """Loads as multiples of a layer's even share; not a number for layers without tokens."""
    experts = load_LE.shape[1]
    total_L1 = load_LE.sum(axis=1, keepdims=True)
    divisor_L1 = np.where(total_L1 > 0, total_L1, np.nan)
    return load_LE * experts / divisor_L1


def logged_layer_numbers(record: Record, count: int) -> list[int]:
    """The layers' numbers as logged, or counted from zero where the line has none."""
    layers = as_float_array(record.get("layers"), 1)
    if layers is None or len(layers) != count:
        return list(range(count))
    if not np.isfinite(layers).all():
        return list(range(count))
    return [int(layer) for layer in layers]


def encode_log_bytes(ratios: np.ndarray) -> tuple[float, float, np.ndarray]:
    """One byte a ratio, 1 to 254 evenly on a log scale from the lowest to the highest there is: loads between 1/32
    and 8 times the even share are exact to about one per cent."""
    finite = np.isfinite(ratios)
    is_positive = ratios > 0
    positive = ratios[finite & is_positive]
    low = 0.0
    high = 0.0
    if positive.size:
        low = float(np.log2(positive.min()))
        high = float(np.log2(positive.max()))
    span = max(high - low, 1e-9)
    codes_above_first = HIGHEST_CODE - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (np.log2(ratios) - low) / span
        place = 1 + np.rint(share * codes_above_first)
    without_tokens = np.where(finite, CODE_NONE, CODE_UNKNOWN)
    codes = np.where(is_positive, place, without_tokens)
    return low, high, codes.astype(np.uint8)
