"""The start of a run and its recorded steps, for single ranks of large worlds (tests/support/dry_run.py)."""

from __future__ import annotations

import pytest

from tests.support.dry_run import DryRun, dry_run_in_new_process

LARGEST_SECONDS = 30.0
SMALL_WORLD, LARGE_WORLD, LARGEST_WORLD = 64, 1024, 4096


def require_constant_cost(small: DryRun, large: DryRun) -> None:
    """The cost of a rank must not grow with the world; larger numbers in the settings take a few bytes more."""
    assert large.seconds < LARGEST_SECONDS, large
    assert large.groups == small.groups, f"{large}; before: {small}"
    assert large.object_bytes < small.object_bytes + 64, f"{large}; before: {small}"
    assert large.grown_mib < small.grown_mib + 24, f"{large}; before: {small}"


def rank_at(place: str, size: int) -> int:
    return {"first": 0, "middle": size // 2, "last": size - 1}[place]


@pytest.mark.extended
def test_a_rank_of_a_thousand_costs_what_a_rank_of_64_costs():
    small = dry_run_in_new_process(SMALL_WORLD, rank_at("middle", SMALL_WORLD))
    large = dry_run_in_new_process(LARGE_WORLD, rank_at("middle", LARGE_WORLD))
    require_constant_cost(small, large)


@pytest.mark.extended
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_rank_of_thousands_starts_and_records_within_seconds(place: str):
    small = dry_run_in_new_process(SMALL_WORLD, rank_at(place, SMALL_WORLD))
    large = dry_run_in_new_process(LARGEST_WORLD, rank_at(place, LARGEST_WORLD))
    require_constant_cost(small, large)
