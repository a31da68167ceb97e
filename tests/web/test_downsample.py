"""Any number of steps in few columns, with nothing lost of sums, least and most."""

from itertools import pairwise

import numpy as np
import pytest

from moefold.web.downsample import NOTHING_TOLD, DownsampledSeries, SeriesColumn


def thinned(values: np.ndarray, limit: int, every: int = 1) -> DownsampledSeries:
    found = DownsampledSeries(limit)
    for i, row in enumerate(values):
        found.add_step(every * (i + 1), row)
    return found


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 16, 17, 100, 1000])
def test_columns_are_few_cover_all_steps_in_order_and_hold_their_mean_least_and_most(steps: int):
    values = np.random.default_rng(steps).normal(size=(steps, 3))
    found = thinned(values, 8)
    assert min(steps, 8) / 2 <= len(found.columns) <= 8
    edges = [(c.first, c.last) for c in found.columns]
    assert edges[0][0] == 1
    assert edges[-1][1] == steps
    assert all(left[1] + 1 == right[0] for left, right in pairwise(edges))
    for c in found.columns:
        part = values[c.first - 1 : c.last]
        assert c.lines == len(part)
        np.testing.assert_allclose(c.mean, part.mean(axis=0), atol=1e-12)
        np.testing.assert_array_equal((c.low, c.high), (part.min(axis=0), part.max(axis=0)))


def test_few_steps_stay_as_they_are():
    values = np.arange(8.0)
    found = thinned(values, 8, every=5)
    assert [float(c.mean) for c in found.columns] == values.tolist()
    steps = list(range(5, 41, 5))
    assert found.changed_since(NOTHING_TOLD).column_steps() == {"from": 0, "first": steps, "last": steps}


def test_what_was_not_measured_does_not_count():
    found = thinned(np.array([[1.0, np.nan], [np.inf, np.nan], [3.0, np.nan], [5.0, 7.0]]), 2)
    assert [c.mean.tolist() for c in found.columns][1] == [4.0, 7.0]
    first = found.columns[0].mean
    assert first[0] == 1.0
    assert np.isnan(first[1])


def test_rows_that_go_back_in_time_or_change_shape_are_passed_over():
    found = DownsampledSeries(8)
    for step, width in ((1, 2), (2, 2), (2, 2), (1, 2), (3, 5), (4, 2)):
        found.add_step(step, np.zeros(width))
    assert [column.first for column in found.columns] == [1, 2, 4]


Edges = list[tuple[int, int, float]]


def edges_of(columns: list[SeriesColumn]) -> Edges:
    return [(column.first, column.last, float(column.total)) for column in columns]


@pytest.mark.parametrize("pauses", [[1] * 70, [2, 3, 1, 7, 1, 1, 20, 1, 30, 5], [64, 1, 1, 4]])
def test_parts_that_were_told_one_after_the_other_are_the_whole(pauses: list[int]):
    found, told, held, sent = DownsampledSeries(8), NOTHING_TOLD, Edges(), 0
    for pause in pauses:
        for step in range(told + 1, told + 1 + pause):
            found.add_step(step, np.asarray(step**0.5))
        changed = found.changed_since(told)
        told += pause
        held = held[: changed.start] + edges_of(changed.columns)
        sent += len(changed.columns)
        assert held == edges_of(found.columns)
        assert not found.changed_since(told).columns
    assert sent <= 8 * len(pauses)
    assert len(pauses) < 70 or sent < 2 * len(pauses), "not the whole each time"
