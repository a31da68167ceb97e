"""Entries of memory.recompute and memory.offload: a region in all layers, in one, in a range, in every n-th of it."""

from __future__ import annotations

import pytest

from moefold.config.memory_regions import parse_offload, parse_recompute

LAYERS = 16
NAMED = {
    ("moe",): {"moe": None},
    ("moe@3",): {"moe": {3}},
    ("moe@3-5",): {"moe": {3, 4, 5}},
    ("moe@1-7/3",): {"moe": {1, 4, 7}},
    ("moe@1-8/3",): {"moe": {1, 4, 7}},
    ("moe@0", "moe@1-5/2", "norm"): {"moe": {0, 1, 3, 5}, "norm": None},
}


@pytest.mark.parametrize("entries", NAMED, ids=str)
def test_entries_of_a_region_add_up(entries: tuple[str, ...]):
    assert parse_recompute(entries, LAYERS) == NAMED[entries]


def test_the_last_layer_is_never_offloaded():
    assert parse_offload(["experts@13-15/2", "core"], LAYERS) == {"experts": {13}, "core": set(range(15))}
