"""Slow links in words: by the seconds that each pair of ranks takes for the same message, which pairs are slow, and
what they have in common: a rank, a node, or the way between two nodes.

Pairs are slow that take at least half as long as the slowest one, if all others together take much less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

SLOW_SHARE = 0.5  # of the slowest pair's seconds
LEAST_RATIO = 3.0  # of the slowest pair to the median of the pairs that are not slow
MOST_NAMED = 3  # pairs without anything in common

Pair = tuple[int, int]  # of ranks, the smaller one first
PairSeconds = Mapping[Pair, float]


class SlowLinks(NamedTuple):
    """The slowest pair of ranks, all that are slow in words, and how many times the others' seconds they take; 0 where
    there are no others."""

    slowest: Pair
    where: str
    ratio: float


def find_slow_links(seconds: PairSeconds, node_size: int) -> SlowLinks | None:
    """What stands out among all pairs; None where nothing does. A single pair is all there is to name."""
    slowest = max(seconds, key=lambda pair: seconds[pair])
    limit = SLOW_SHARE * seconds[slowest]
    slow = {pair for pair in seconds if seconds[pair] >= limit}
    others = [seconds[pair] for pair in seconds if pair not in slow]
    if not others:
        return SlowLinks(slowest, describe_links(slow, set(seconds), node_size), 0.0) if len(slow) == 1 else None
    ratio = seconds[slowest] / max(median(others), 1e-9)
    if ratio < LEAST_RATIO:
        return None
    return SlowLinks(slowest, describe_links(slow, set(seconds), node_size), ratio)


def describe_links(slow: set[Pair], every: set[Pair], node_size: int) -> str:
    """What some of all pairs have in common."""
    if len(slow) == 1:
        ((first, second),) = slow
        return f"the link between rank {first} and rank {second}{nodes_in_brackets(first, second, node_size)}"
    ways = {node_pair(pair, node_size) for pair in slow}
    if len(ways) == 1 and slow == {pair for pair in every if node_pair(pair, node_size) in ways}:
        ((first, second),) = ways
        if first != second:
            return f"the link between {node_name(first, node_size)} and {node_name(second, node_size)}"
    for rank in common(slow):
        return f"the links of rank {rank}"
    for node in common(ways):
        return f"the links of {node_name(node, node_size)}"
    return listed_links(slow)


def node_pair(pair: Pair, node_size: int) -> Pair:
    first, second = pair
    return first // node_size, second // node_size


def nodes_in_brackets(first: int, second: int, node_size: int) -> str:
    near, far = node_pair((first, second), node_size)
    return "" if near == far else f" (nodes {near} and {far})"


def node_name(node: int, node_size: int) -> str:
    first = node * node_size
    ranks = f"rank {first}" if node_size == 1 else f"ranks {first}-{first + node_size - 1}"
    return f"node {node} ({ranks})"


def common(pairs: Iterable[Pair]) -> list[int]:
    """The numbers that all pairs have."""
    shared = set[int].intersection(*map(set, pairs))
    return sorted(shared)


def listed_links(slow: set[Pair]) -> str:
    shown = [f"{first} and {second}" for first, second in sorted(slow)[:MOST_NAMED]]
    more = len(slow) - len(shown)
    rest = f" and {more} more" if more else ""
    return f"the links between ranks {', '.join(shown)}{rest}"
