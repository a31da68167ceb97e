"""The parts in which attention's backward on Hopper works on a sequence, and the workspace that they need. Torch-free.

A part has some key/value heads, some of the query heads that each serves, a strip of the queries and a range of the
keys that they see, so that its gradients of scores fit into memory. Sums go from one part to the next in fp32: those of
dK and dV over strips and heads, those of dQ over ranges, of which only very long sequences have several.

    keys       0 1 2 3 4 5 6 7      a strip of the query blocks 4 5 6: key blocks 0 to 4 are seen by all three of them,
    queries  4 # # # # #            5 by two, 6 by one; programs of equal length run in waves, of one program to a
             5 # # # # # #          multiprocessor, and shorter ones fill the last
             6 # # # # # # #

Parts are chosen for the shortest predicted time. Its unit, a step, is 64 queries of one head on 128 keys in the kernel
of keys. T tiles of 64 queries; a unit of work is a key/value head of a sequence with its GROUP query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from moefold.kernels.attention.workspace import (
    BYTES_PER_SCORE,
    KEY_BLOCK,
    QUERY_TILE,
    ceil_div,
    even_rounds,
    kv_head_bytes,
    kv_heads_at_once,
)

PARTS_BYTES = 4 << 30  # limit of dS^T of a part together with the sums
TILE_BYTES = KEY_BLOCK * QUERY_TILE * BYTES_PER_SCORE
BYTES_PER_SUM = 4
MULTIPROCESSORS = 132
PROGRAM_STEPS = 4.0  # a program's beginning and end, with sums carried
DQ_PROGRAM_STEPS = 3.0
LAUNCH_STEPS = 8.0
DQ_STEP = 0.32  # the kernel of queries reads what a step has stored
DQ_ALONE = 1.5  # how much faster a multiprocessor reads than its even share of the memory's rate
FILLS = (1.0, 0.85, 0.65)  # shares of the memory that are tried
SHORTEST = 0.75  # of the longest strip that fits
ENDS_TRIED = 6  # for a strip
MANY_STRIPS = 24  # more are cut only where one head at a time leaves no choice
RANGE_BLOCKS = (1024, 512)  # lengths of a range that are tried, beside all keys


class Part(NamedTuple):
    """Query tiles from `top` to before `end`, key blocks from `first` to before `last`, and so many query heads of each
    group from `head` on."""

    top: int
    end: int
    first: int
    last: int
    head: int
    heads: int


class BackwardPlan(NamedTuple):
    """Units that are worked on at once, the parts of each, one after the other, and bytes: of dS^T, and of the sums of
    dK and dV and of dQ, if these are carried."""

    units: int
    parts: tuple[Part, ...]
    score_bytes: int
    key_sum_bytes: int = 0
    query_sum_bytes: int = 0

    @property
    def workspace(self) -> int:
        return self.score_bytes + self.key_sum_bytes + self.query_sum_bytes


class Scores(NamedTuple):
    """T tiles of queries, an even number, whether they are causal, and the width of a head."""

    T: int
    causal: bool
    width: int

    def seen_blocks(self, end: int) -> int:
        """Key blocks that a strip sees."""
        return end // 2 if self.causal else self.T // 2

    def tiles(self, top: int, end: int, first: int, last: int) -> int:
        """Those of one head's dS^T: pairs of a query tile and a key block that it sees."""
        tiles = (end - top) * (last - first)
        if self.causal:
            behind = max(last - 1 - top // 2, 0)
            tiles -= behind * (behind + 1)
        return tiles

    def tiles_of_part(self, part: Part) -> int:
        return part.heads * self.tiles(part.top, part.end, part.first, part.last)


class Division(NamedTuple):
    """Units and query heads at once, and ranges of keys."""

    units: int
    heads: int
    ranges: int


@cache
def plan_backward(
    positions: int, units: int, group: int, width: int, value_width: int, causal: bool = True
) -> BackwardPlan | None:
    """Whole sequences where some key/value head fits with its query heads, else parts; None where not even 128 queries
    of one head do, and for parts of heads whose values are narrower."""
    tiles = 2 * ceil_div(positions, KEY_BLOCK)
    scores = Scores(tiles, causal, width)
    together = kv_heads_at_once(positions, units, group, causal)
    if together:
        blocks = tiles // 2
        whole = Part(0, tiles, 0, blocks, 0, group)
        score_bytes = together * kv_head_bytes(positions, group, causal)
        return BackwardPlan(together, (whole,), score_bytes)
    if width != value_width:
        return None
    best: BackwardPlan | None = None
    fewest = float("inf")
    for division in divisions(scores, units, group):
        for plan in plans_of_division(scores, division, group):
            rounds = ceil_div(units, division.units)
            steps = rounds * steps_of_plan(scores, plan)
            if steps < fewest:
                best, fewest = plan, steps
    return best


def divisions(scores: Scores, units: int, group: int) -> Iterator[Division]:
    blocks = scores.T // 2
    counts = {1} | {max(1, blocks // size) for size in RANGE_BLOCKS}
    for ranges in sorted(counts):
        for units_at_once in even_shares(units):
            for heads in even_shares(group):
                yield Division(units_at_once, heads, ranges)


def even_shares(count: int) -> list[int]:
    """How many of `count` may go at once, in rounds of nearly equal size."""
    shares = {even_rounds(count, most) for most in range(1, count + 1)}
    return sorted(shares)


def plans_of_division(scores: Scores, division: Division, group: int) -> Iterator[BackwardPlan]:
    positions = scores.T * QUERY_TILE
    position_bytes = division.units * scores.width * BYTES_PER_SUM
    key_sum_bytes = 2 * positions * position_bytes
    for fill in FILLS:
        limit = int(fill * (PARTS_BYTES - key_sum_bytes))
        strips = plan_strips(scores, division, limit)
        if not strips:
            return
        parts = tuple(parts_of_strips(scores, strips, division, group))
        most_tiles = max(map(scores.tiles_of_part, parts))
        score_bytes = division.units * most_tiles * TILE_BYTES
        sum_bytes = query_sum_bytes(strips, division, scores)
        plan = BackwardPlan(division.units, parts, score_bytes, key_sum_bytes, sum_bytes)
        if plan.workspace <= PARTS_BYTES:
            yield plan


def query_sum_bytes(strips: list[tuple[int, int]], division: Division, scores: Scores) -> int:
    """Of the longest strip."""
    if division.ranges == 1:
        return 0
    longest = max(end - top for top, end in strips)
    heads = division.units * division.heads
    return heads * longest * QUERY_TILE * scores.width * BYTES_PER_SUM


def plan_strips(scores: Scores, division: Division, limit: int) -> list[tuple[int, int]]:
    """Strips one after the other, each as long as fits or somewhat shorter, as its programs share the card best; none
    where not even one fits."""
    strips: list[tuple[int, int]] = []
    one_head = division.units * division.heads == 1
    top = 0
    while top < scores.T:
        if len(strips) == MANY_STRIPS and not one_head:
            return []
        longest = longest_end(scores, division, top, limit)
        if longest == top:
            return []
        end = longest
        if longest < scores.T and len(strips) < MANY_STRIPS:
            end = best_end(scores, division, top, longest)
        strips.append((top, end))
        top = end
    return strips


def longest_end(scores: Scores, division: Division, top: int, limit: int) -> int:
    """The end of the longest strip from `top` on whose parts need at most so many bytes; `top` itself if none do."""
    fits, too_long = top, scores.T + 2
    while too_long - fits > 2:
        middle = (fits + too_long) // 4 * 2
        borders = range_borders(scores, top, middle, division.ranges)
        most_tiles = max(scores.tiles(top, middle, *borders[:2]), scores.tiles(top, middle, *borders[-2:]))
        score_bytes = division.units * division.heads * most_tiles * TILE_BYTES
        needed = score_bytes + query_sum_bytes([(top, middle)], division, scores)
        if needed <= limit:
            fits = middle
        else:
            too_long = middle
    return fits


def best_end(scores: Scores, division: Division, top: int, longest: int) -> int:
    """The end of least steps for the work of a strip."""
    shortest = top + int(SHORTEST * (longest - top)) // 2 * 2
    first = max(shortest, top + 2)
    stride = max(2, (longest - first) // ENDS_TRIED // 2 * 2)

    def steps_per_work(end: int) -> float:
        parts = list(parts_of_strips(scores, [(top, end)], division, division.heads))
        steps = sum(steps_of_part(scores, division.units, part) for part in parts)
        return steps / sum(map(scores.tiles_of_part, parts))

    ends = range(longest, first - 1, -stride)
    return min(ends, key=steps_per_work)


def parts_of_strips(scores: Scores, strips: list[tuple[int, int]], division: Division, group: int) -> Iterator[Part]:
    """The heads of each strip, one share after the other, and the ranges of each, the last with the diagonal."""
    for top, end in strips:
        borders = range_borders(scores, top, end, division.ranges)
        for head in range(0, group, division.heads):
            heads = min(division.heads, group - head)
            for first, last in pairwise(borders):
                yield Part(top, end, first, last, head, heads)


def range_borders(scores: Scores, top: int, end: int, ranges: int) -> list[int]:
    """Borders of at most so many even ranges of the keys that a strip sees, none of them behind its first diagonal
    block: every query sees some key of each range."""
    seen = scores.seen_blocks(end)
    latest = top // 2 if scores.causal else seen
    size = max(ceil_div(seen, ranges), 1)
    inner = range(size, min(latest, seen - 1) + 1, size)
    return [0, *inner, seen]


class Programs(NamedTuple):
    """Programs of a launch by length: so many of the longest, then levels of so many each, shorter from one to the
    next."""

    longest: float
    equal: int
    per_level: int
    levels: int
    drop: float

    @property
    def work(self) -> float:
        mean_of_levels = self.longest - self.drop * (self.levels - 1) / 2
        return self.equal * self.longest + self.per_level * self.levels * mean_of_levels

    def length(self, place: int) -> float:
        """Of the longest, the next longest, and so on; zero behind the last."""
        if place < self.equal:
            return self.longest
        level = (place - self.equal) // self.per_level
        return self.longest - self.drop * level if level < self.levels else 0.0

    def duration(self) -> float:
        """Until the last one ends, if multiprocessors take the longest first: waves of equal programs, then the even
        share of what is left, if no programs that must share a multiprocessor take longer."""
        waves, rest = divmod(self.equal, MULTIPROCESSORS)
        last = self._replace(equal=rest)
        even = last.work / MULTIPROCESSORS
        count = rest + self.per_level * self.levels
        sharing = range(0, count, MULTIPROCESSORS)
        most = max((shared * last.length(place) for shared, place in enumerate(sharing, 1)), default=0.0)
        return waves * self.longest + max(even, most)


def steps_of_plan(scores: Scores, plan: BackwardPlan) -> float:
    return sum(steps_of_part(scores, plan.units, part) for part in plan.parts)


def steps_of_part(scores: Scores, units: int, part: Part) -> float:
    keys = part.last - part.first
    behind = max(part.last - 1 - part.top // 2, 0) if scores.causal else 0
    return steps_of_launches(units, part.heads, part.end - part.top, keys, behind)


@cache
def steps_of_launches(units: int, heads: int, tiles: int, keys: int, behind: int) -> float:
    """Of both kernels, on so many tiles of queries and blocks of keys; `behind` of these some queries do not see."""
    of_keys = Programs(heads * tiles + PROGRAM_STEPS, units * (keys - behind), units, behind, 2.0 * heads)
    drop = 2 * DQ_STEP if behind else 0.0
    of_queries = Programs(2 * keys * DQ_STEP + DQ_PROGRAM_STEPS, 0, units * heads, tiles // 2, drop)
    reading = max(of_queries.duration() / DQ_ALONE, of_queries.work / MULTIPROCESSORS)
    return of_keys.duration() + reading + LAUNCH_STEPS


def unit_rounds(units: int, together: int) -> Iterator[tuple[int, int]]:
    """First unit of each round, and how many."""
    for unit in range(0, units, together):
        yield unit, min(together, units - unit)


def backward_workspace(
    positions: int,
    sequences: int,
    kv_heads: int,
    group: int,
    width: int,
    value_width: int,
) -> int:
    """Bytes of the workspace of causal attention's backward; 0 where the kernels for Hopper do not run."""
    plan = plan_backward(positions, sequences * kv_heads, group, width, value_width)
    return plan.workspace if plan else 0
