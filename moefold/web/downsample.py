"""Downsampling of a long series to at most `limit` columns, by merging neighbours.

    limit 4:   1 2 3 4  ->  12 34 5. ..  ->  12 34 56 78  ->  1234 5678 9... ....

One pass over a file of any length, in the memory of `limit` rows.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NOTHING_TOLD = -1  # a step before all others


@dataclass
class SeriesColumn:
    """Consecutive steps, merged: of each value the number of measurements, the sum, minimum and maximum."""

    first: int
    last: int
    lines: int
    count: np.ndarray
    total: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def merge_with(self, other: SeriesColumn) -> None:
        self.last = other.last
        self.lines += other.lines
        self.count = self.count + other.count
        self.total = self.total + other.total
        self.low = np.fmin(self.low, other.low)
        self.high = np.fmax(self.high, other.high)

    @property
    def mean(self) -> np.ndarray:
        measured = self.count > 0
        divisor = np.maximum(self.count, 1)
        means = self.total / divisor
        return np.where(measured, means, np.nan)


def single_step_column(step: int, values: np.ndarray) -> SeriesColumn:
    """A column of one step; non-finite values count as not measured."""
    finite = np.isfinite(values)
    count = finite.astype(np.int64)
    total = np.where(finite, values, 0.0)
    measured = np.where(finite, values, np.nan)
    return SeriesColumn(step, step, 1, count, total, measured, measured)


class DownsampledSeries:
    """At most `limit` columns of equally shaped values, in the order of their steps."""

    def __init__(self, limit: int):
        even_limit = limit - limit % 2
        self.limit = max(2, even_limit)
        self.lines_per_column = 1
        self.columns: list[SeriesColumn] = []
        self.merged_at = NOTHING_TOLD  # the step at which neighbours were last merged

    def add_step(self, step: int, values: np.ndarray) -> None:
        """Add one row; a row of an earlier step, or of another shape than the first, is skipped."""
        column = single_step_column(step, values)
        if not self.columns:
            self.columns.append(column)
            return
        newest = self.columns[-1]
        same_shape = values.shape == newest.total.shape
        if step <= newest.last or not same_shape:
            return
        # The newest column fills up before a new one begins.
        if newest.lines < self.lines_per_column:
            newest.merge_with(column)
            return
        if len(self.columns) == self.limit:
            self.merge_neighbours()
            self.merged_at = step
        self.columns.append(column)

    def merge_neighbours(self) -> None:
        left_columns = self.columns[::2]
        right_columns = self.columns[1::2]
        for left, right in zip(left_columns, right_columns, strict=True):
            left.merge_with(right)
        self.columns = left_columns
        self.lines_per_column *= 2

    def changed_since(self, step: int) -> ChangedColumns:
        """The columns that steps behind this one have changed: the last ones, or all where neighbours were merged."""
        if step < self.merged_at:
            return ChangedColumns(0, self.columns)
        last_steps = [column.last for column in self.columns]
        start = bisect_right(last_steps, step)
        return ChangedColumns(start, self.columns[start:])


class ChangedColumns(NamedTuple):
    """The columns of a series from number `start` on; those before are as they were told."""

    start: int
    columns: list[SeriesColumn]

    def column_steps(self) -> dict[str, int | list[int]]:
        first = [column.first for column in self.columns]
        last = [column.last for column in self.columns]
        return {"from": self.start, "first": first, "last": last}
