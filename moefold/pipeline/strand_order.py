"""The order of strands: pieces of work begun such that exchanges run beside compute.

A strand is the forward or the backward of a microbatch through a stage: a graph of pieces, each of which waits for
those that it needs. Pieces of the comm lane run concurrently with those of the compute lane. One microbatch by itself,
forward, with shared experts:

    compute    attend route      shared     experts          add
    comm                     PLAN DISPATCH          COMBINE

A forward, and the backward of another microbatch, of one MoE layer:

    forward    attend route DISPATCH experts COMBINE
    backward   COMBINE experts DISPATCH route attend

    compute    attend.F  route.F  experts.B  experts.F   route.B  attend.B
    comm       COMBINE.B      DISPATCH.F   DISPATCH.B   COMBINE.F

Pure: pieces in, order out. Every rank that shares experts interleaves the same way, so that their collectives match:
costs must be the same on all of them. Weight gradients that wait are not part of the order: they depend on nothing, and
run whenever the compute lane would wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from moefold.anatomy.step_specs import Lane


@dataclass(frozen=True, eq=False)  # hashed by identity, which is quick: a run makes its strands once
class StrandPiece:
    """A piece of a strand; `needs`: the numbers of earlier pieces that must have ended."""

    lane: Lane
    cost: float = 1.0
    needs: tuple[int, ...] = ()


Strand = tuple[StrandPiece, ...]
PieceKey = tuple[int, int]  # the number of a strand, and of a piece in it
PieceEnds = dict[PieceKey, float]
Costs = list[float]  # by piece of a strand


@lru_cache(maxsize=256)
def interleave_strands(strands: tuple[Strand, ...]) -> tuple[PieceKey, ...]:
    """The order in which to begin pieces: of those by two rules, the one that ends first by a simulated clock."""
    costs_left = list(map(costs_to_the_end, strands))
    pieces_left = list(map(pieces_to_the_end, strands))
    by_costs = order_by_rule(strands, costs_left)
    by_pieces = order_by_rule(strands, pieces_left)
    best = min(by_costs, by_pieces, key=end_of_order)
    return tuple(best)


@lru_cache(maxsize=256)
def issue_order(strands: tuple[Strand, ...]) -> tuple[PieceKey, ...]:
    """The same order of each lane, with pieces of the comm lane handed to it as soon as the compute that they need has
    ended: the lane itself keeps its pieces in order, and none waits there for compute that it does not need."""
    waiting: deque[PieceKey] = deque()
    computing: deque[PieceKey] = deque()
    for key in interleave_strands(strands):
        s, i = key
        lane = waiting if strands[s][i].lane == "comm" else computing
        lane.append(key)
    issued: dict[PieceKey, None] = {}  # in order
    while waiting or computing:
        while waiting and has_needs(strands, waiting[0], issued):
            key = waiting.popleft()
            issued[key] = None
        if computing:
            key = computing.popleft()
            issued[key] = None
    return tuple(issued)


def has_needs(strands: Sequence[Strand], key: PieceKey, issued: Collection[PieceKey]) -> bool:
    """Whether all that a piece needs has been issued."""
    s, i = key
    return all((s, need) in issued for need in strands[s][i].needs)


def order_by_rule(strands: Sequence[Strand], left: Sequence[Costs]) -> PieceEnds:
    """Pieces in the order in which they begin, with their ends. The next piece is the one that can begin first; of
    several, communication first, then the one with more `left` behind it."""
    lane_free = {"compute": 0.0, "comm": 0.0}
    readers = list(map(readers_of, strands))
    ends: PieceEnds = {}
    ready: list[PieceKey] = []
    for s, strand in enumerate(strands):
        for i, piece in enumerate(strand):
            if not piece.needs:
                ready.append((s, i))

    def earliest_start(key: PieceKey) -> float:
        s, i = key
        piece = strands[s][i]
        start = max(lane_free[piece.lane], 0.0)
        for need in piece.needs:
            needed = ends[s, need]
            start = max(start, needed)
        return start

    def priority(key: PieceKey) -> tuple[float, bool, float, PieceKey]:
        s, i = key
        piece = strands[s][i]
        start = earliest_start(key)
        computes = piece.lane == "compute"
        behind = left[s][i]
        return start, computes, -behind, key

    while ready:
        key = min(ready, key=priority)
        ready.remove(key)
        s, i = key
        piece = strands[s][i]
        end = earliest_start(key) + piece.cost
        ends[key] = end
        lane_free[piece.lane] = end
        for reader in readers[s][i]:
            needs = strands[s][reader].needs
            if all((s, need) in ends for need in needs):
                follower = s, reader
                ready.append(follower)
    return ends


def end_of_order(ends: PieceEnds) -> float:
    return max(ends.values(), default=0.0)


def readers_of(strand: Strand) -> dict[int, list[int]]:
    """By piece: the pieces that need it."""
    readers = defaultdict[int, list[int]](list)
    for number, piece in enumerate(strand):
        for need in piece.needs:
            readers[need].append(number)
    return readers


def costs_to_the_end(strand: Strand) -> Costs:
    """By piece: the cost of the longest chain from it to the end of the strand."""
    readers = readers_of(strand)
    pieces = len(strand)
    costs = [0.0] * pieces
    for number in reversed(range(pieces)):
        longest = 0.0
        for reader in readers[number]:
            longest = max(longest, costs[reader])
        costs[number] = strand[number].cost + longest
    return costs


def pieces_to_the_end(strand: Strand) -> Costs:
    """By piece: how many pieces the longest chain from it to the end of the strand has."""
    even = [replace(piece, cost=1.0) for piece in strand]
    return costs_to_the_end(tuple(even))


def backward_strand(forward: Strand, compute_factor: float) -> Strand:
    """The strand of a backward: the pieces of its forward from the last to the first, each of which needs those that
    needed it. A compute piece costs `compute_factor` of its forward; an exchange costs the same."""
    last = len(forward) - 1
    readers = readers_of(forward)
    pieces: list[StrandPiece] = []
    for number, piece in reversed(list(enumerate(forward))):
        cost = piece.cost
        if piece.lane == "compute":
            cost *= compute_factor
        needs = [last - reader for reader in readers[number]]
        backward = StrandPiece(piece.lane, cost, tuple(needs))
        pieces.append(backward)
    return tuple(pieces)
