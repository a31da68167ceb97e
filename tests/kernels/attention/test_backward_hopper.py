"""The places of tiles in the memory for dS^T; the kernels themselves are in test_backward_hopper_launch.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from moefold.kernels.attention.backward_hopper import LaunchPart, ds_tile_first_row
from moefold.kernels.attention.backward_parts import Scores


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strip", [(0, 12, 0, 6), (4, 12, 0, 6), (6, 8, 0, 3), (6, 12, 3, 6), (6, 12, 0, 2)], ids=str)
def test_every_tile_of_a_part_has_a_place_of_its_own(strip: tuple[int, int, int, int], causal: bool):
    top, end, first, last = strip
    each = Scores(12, causal, 64).tiles(*strip)
    part = LaunchPart(*strip, 0, 3, each)
    rows = [
        ds_tile_first_row.fn(head, n, t, max(n - top // 2, 0), part, causal)
        for head in range(3)
        for n in range(first, last)
        for t in range(top, end)
        if not causal or t >= 2 * n
    ]
    assert sorted(rows) == [128 * tile for tile in range(3 * each)]
