"""Heads go together as their memory allows: all of them, evenly, and never more than there is room for."""

from __future__ import annotations

import pytest

from moefold.kernels.attention import workspace
from moefold.kernels.attention.workspace import MOST_BYTES, kv_heads_at_once, score_gradient_rows


def test_heads_go_together_as_evenly_as_can_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workspace, "MOST_BYTES", 3 * 2 * score_gradient_rows(1000) * 128)
    assert [kv_heads_at_once(1000, units, 2) for units in (1, 3, 4, 6, 7)] == [1, 3, 2, 3, 3]
    assert kv_heads_at_once(1000, 4, 7) == 0


@pytest.mark.parametrize("positions", [1, 128, 129, 4096, 16384, 131072])
@pytest.mark.parametrize("units", [1, 7, 64])
@pytest.mark.parametrize("group", [1, 8])
def test_there_is_room_for_those_that_go_together(positions: int, units: int, group: int):
    each, together = group * score_gradient_rows(positions) * 128, kv_heads_at_once(positions, units, group)
    assert together * each <= MOST_BYTES
    assert together or each > MOST_BYTES


def test_a_head_has_a_tile_for_each_64_queries_that_see_some_of_128_keys():
    seeing = [(t, n) for t in range(16) for n in range(8) if 64 * t + 63 >= 128 * n]
    assert score_gradient_rows(1000) == 128 * len(seeing)
