"""Numbers of a page: read from files that may hold anything, and written short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_STEPS = 2**53  # JavaScript's integers end there

JsonObject = dict[str, Any]


def as_float_array(value: Any, dims: int) -> np.ndarray | None:
    """The value as an array of so many dimensions, or None when it is not one, or empty."""
    if value is None:
        return None
    try:
        array = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    if array.ndim != dims or not array.size:
        return None
    return array


def rounded_values(values: Sequence[Any]) -> list[float | None]:
    return [round_significant(float(value)) for value in values]


def round_significant(value: float) -> float | None:
    """Numbers with five digits; None for values that JSON cannot write."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    if short.is_integer():
        return int(short)
    return short
