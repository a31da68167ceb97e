"""Heads go together as their memory allows: all of them, evenly, and never more than there is room for."""

from __future__ import annotations

import pytest

from moefold.kernels.attention_room import MOST_BYTES, ds_bytes, ds_rows, units_at_once


@pytest.mark.parametrize("positions", [1, 128, 129, 4096, 16384, 131072])
@pytest.mark.parametrize("units", [1, 7, 16, 64])
@pytest.mark.parametrize("group", [1, 8])
def test_they_go_in_as_few_launches_as_fit_and_evenly(positions: int, units: int, group: int):
    each, together = group * ds_rows(positions) * 128, units_at_once(positions, units, group)
    assert ds_bytes(positions, units, group) == together * each <= MOST_BYTES
    if not together:
        assert each > MOST_BYTES
        return
    launches = -(-units // together)
    assert launches == -(-units * each // (MOST_BYTES // each * each)), "as few as can be"
    assert units - (launches - 1) * together > together - launches, "the last is about as large as the others"


def test_every_score_that_is_seen_has_a_place():
    for positions in (1, 64, 65, 128, 200, 1000):
        seen = sum(-(-(q + 1) // 128) * 128 for q in range(positions))  # keys in whole blocks
        assert ds_rows(positions) * 64 >= seen
