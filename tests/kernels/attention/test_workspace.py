"""Heads go together as their memory allows: all of them, evenly, and never more than there is room for."""

from __future__ import annotations

import pytest

from moefold.kernels.attention import workspace
from moefold.kernels.attention.workspace import (
    MOST_BYTES,
    backward_workspace,
    kv_heads_at_once,
    plan_chunks,
    score_gradient_bytes,
    score_gradient_rows,
)


def test_heads_go_together_as_evenly_as_can_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workspace, "MOST_BYTES", 3 * 2 * score_gradient_rows(1000) * 128)
    assert [kv_heads_at_once(1000, units, 2) for units in (1, 3, 4, 6, 7)] == [1, 3, 2, 3, 3]
    assert kv_heads_at_once(1000, 4, 7) == 0


@pytest.mark.parametrize("positions", [1, 128, 129, 4096, 16384, 131072])
@pytest.mark.parametrize("units", [1, 7, 64])
@pytest.mark.parametrize("group", [1, 8])
def test_there_is_room_for_those_that_go_together(positions: int, units: int, group: int):
    each, together = group * score_gradient_rows(positions) * 128, kv_heads_at_once(positions, units, group)
    assert score_gradient_bytes(positions, units, group) == together * each <= MOST_BYTES
    assert together or each > MOST_BYTES


def test_a_head_has_a_tile_for_each_64_queries_that_see_some_of_128_keys():
    seeing = [(t, n) for t in range(16) for n in range(8) if 64 * t + 63 >= 128 * n]
    assert score_gradient_rows(1000) == 128 * len(seeing)


@pytest.mark.parametrize("heads", [(4, 8), (16, 1), (8, 4), (4, 16)], ids=str)
@pytest.mark.parametrize("thousands", [8, 32, 128, 320, 1024])
def test_long_sequences_have_even_chunks_and_four_gibibytes_are_enough(thousands: int, heads: tuple[int, int]):
    kv_heads, group = heads
    positions = thousands * 1024
    if not kv_heads_at_once(positions, kv_heads, group):
        plan = plan_chunks(positions, kv_heads, group, 128)
        assert plan is not None
        assert positions % plan.positions == 0
        assert plan.positions >= 4096
        assert backward_workspace(positions, 1, kv_heads, group, 128) <= 4 << 30


@pytest.mark.parametrize("thousands", [8, 32, 128])
def test_one_sequence_of_32_query_and_4_key_heads_of_128_needs_at_most_four_gibibytes(thousands: int):
    assert 0 < backward_workspace(thousands * 1024, 1, 4, 8, 128) <= 4 << 30


def test_a_length_without_even_chunks_has_no_plan():
    assert plan_chunks(131_071, 4, 8, 128) is None
    assert backward_workspace(131_071, 1, 4, 8, 128) == 0
