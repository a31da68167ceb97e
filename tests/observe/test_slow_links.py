"""Slow links in words: what the pairs that take long have in common is named, and nothing where none stands out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from moefold.observe.slow_links import find_slow_links

RANKS = 4
NODE = 2


def named(is_slow: Callable[[int, int], bool], ranks: int = RANKS, node: int = NODE) -> str:
    seconds = {pair: 0.2 if is_slow(*pair) else 0.01 for pair in combinations(range(ranks), 2)}
    found = find_slow_links(seconds, node)
    return found.where if found else ""


@pytest.mark.parametrize(
    ("is_slow", "expected"),
    [
        (lambda a, b: (a, b) == (0, 1), "the link between rank 0 and rank 1"),
        (lambda a, b: (a, b) == (1, 2), "the link between rank 1 and rank 2 (nodes 0 and 1)"),
        (lambda a, b: a // NODE != b // NODE, "the link between node 0 (ranks 0-1) and node 1 (ranks 2-3)"),
        (lambda a, b: 3 in (a, b), "the links of rank 3"),
        (lambda a, b: b >= 2, "the links of node 1 (ranks 2-3)"),
        (lambda a, b: (a, b) in ((0, 1), (2, 3)), "the links between ranks 0 and 1, 2 and 3"),
        (lambda a, b: False, ""),
        (lambda a, b: True, ""),
    ],
    ids=["pair", "pair of two nodes", "way", "rank", "node", "list", "none", "all alike"],
)
def test_what_slow_pairs_have_in_common_is_named(is_slow: Callable[[int, int], bool], expected: str):
    assert named(is_slow) == expected


def test_the_link_of_two_ranks_is_named_and_ordinary_differences_are_not():
    assert named(lambda a, b: True, ranks=2, node=1) == "the link between rank 0 and rank 1 (nodes 0 and 1)"
    ordinary = {pair: 0.01 + 0.004 * sum(pair) for pair in combinations(range(RANKS), 2)}
    assert find_slow_links(ordinary, NODE) is None


def test_the_slowest_pair_is_told_with_how_many_times_the_others_it_takes():
    seconds = {(0, 1): 0.01, (0, 2): 0.3, (1, 2): 0.25}
    found = find_slow_links(seconds, 3)
    assert found is not None
    assert (found.slowest, found.where) == ((0, 2), "the links of rank 2")
    assert found.ratio == pytest.approx(30)
