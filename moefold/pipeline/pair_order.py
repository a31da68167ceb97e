"""The order of a paired slot: two strands of work interleaved so that one communicates while the other computes.

A strand is a chain: each piece waits for the one before it. Pieces of the comm lane run concurrently with those of the
compute lane. A forward, and the backward of another microbatch, of one MoE layer:

    forward    attend route DISPATCH experts COMBINE
    backward   COMBINE experts DISPATCH route attend

    compute    attend.F  route.F  experts.B  experts.F   route.B  attend.B
    comm       COMBINE.B      DISPATCH.F   DISPATCH.B   COMBINE.F

Pure: pieces in, order out. Every rank that shares experts interleaves the same way, so that their collectives match.
Weight gradients are not part of the order: they depend on nothing, and run whenever the compute lane would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moefold.anatomy.step_specs import Lane


@dataclass(frozen=True)
class StrandPiece:
    lane: Lane
    cost: float = 1.0


@lru_cache(maxsize=256)
def paired_slot_order(forward: tuple[Lane, ...], backward: tuple[Lane, ...]) -> tuple[tuple[int, int], ...]:
    """The order of a forward (strand 0) and a backward (strand 1), given the lane of each step."""
    forward_pieces = [StrandPiece(lane) for lane in forward]
    backward_pieces = [StrandPiece(lane) for lane in backward]
    order = interleave_strands([forward_pieces, backward_pieces])
    return tuple(order)


def interleave_strands(strands: Sequence[Sequence[StrandPiece]]) -> list[tuple[int, int]]:
    """The order in which to begin pieces, as (strand, index). The next piece is the one that can begin first by a
    simulated clock; of several, communication first, then the strand with more cost left."""
    lane_free = {"compute": 0.0, "comm": 0.0}
    strand_free = [0.0] * len(strands)
    position = [0] * len(strands)
    order: list[tuple[int, int]] = []

    def start_priority(strand: int) -> tuple[float, bool, float, int]:
        rest = strands[strand][position[strand] :]
        lane = rest[0].lane
        start = max(strand_free[strand], lane_free[lane])
        cost_left = sum(piece.cost for piece in rest)
        return start, lane == "compute", -cost_left, strand

    pieces = sum(map(len, strands))
    while len(order) < pieces:
        unfinished = [s for s, strand in enumerate(strands) if position[s] < len(strand)]
        start, _, _, strand = min(map(start_priority, unfinished))
        index = position[strand]
        piece = strands[strand][index]
        end = start + piece.cost
        lane_free[piece.lane] = end
        strand_free[strand] = end
        order.append((strand, index))
        position[strand] += 1
    return order
