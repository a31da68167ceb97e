"""Long stories told in few columns: rows come in step by step, and when there are too many, neighbours join in twos.

    limit 4:   1 2 3 4  ->  12 34 5. ..  ->  12 34 56 78  ->  1234 5678 9... ....

One pass over a file of any length, in the memory of `limit` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class SeriesColumn:
    """Some steps in a row, joined: of each value how often it was measured, the sum, the least and the most."""

    first: int
    last: int
    lines: int
    count: np.ndarray
    total: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def join(self, other: SeriesColumn) -> None:
        self.last, self.lines = other.last, self.lines + other.lines
        self.count = self.count + other.count
        self.total = self.total + other.total
        self.low, self.high = np.fmin(self.low, other.low), np.fmax(self.high, other.high)

    @property
    def mean(self) -> np.ndarray:
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)


def single_step_column(step: int, values: np.ndarray) -> SeriesColumn:
    """One step alone; what is no finite number was not measured."""
    known = np.isfinite(values)
    whole = np.where(known, values, np.nan)
    return SeriesColumn(step, step, 1, known.astype(np.int64), np.where(known, values, 0.0), whole, whole)


class DownsampledSeries:
    """At most `limit` columns of equally shaped values, in the order of their steps."""

    def __init__(self, limit: int):
        self.limit = max(2, limit - limit % 2)
        self.per = 1  # lines a full column holds
        self.columns: list[SeriesColumn] = []

    def add(self, step: int, values: np.ndarray) -> None:
        """Take one more row; one that goes back in time, or has another shape than the first, is passed over."""
        if self.columns and (step <= self.columns[-1].last or values.shape != self.columns[-1].total.shape):
            return
        new = single_step_column(step, values)
        if self.columns and self.columns[-1].lines < self.per:
            self.columns[-1].join(new)
            return
        if len(self.columns) == self.limit:
            self.merge_neighbours()
        self.columns.append(new)

    def merge_neighbours(self) -> None:
        for left, right in zip(self.columns[::2], self.columns[1::2], strict=True):
            left.join(right)
        self.columns, self.per = self.columns[::2], 2 * self.per

    def steps(self) -> dict[str, list[int]]:
        return {"first": [c.first for c in self.columns], "last": [c.last for c in self.columns]}
