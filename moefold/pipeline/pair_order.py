"""Weaving two strands of work into one order, so that communication of one faces compute of the other.

A strand is a chain: each piece waits for the one before it. Pieces of the comm lane run beside those of the compute
lane. A forward, and the backward of another microbatch, of one MoE layer:

    forward    attend route DISPATCH experts COMBINE
    backward   COMBINE experts DISPATCH route attend

    compute    attend.F  route.F  experts.B  experts.F   route.B  attend.B
    comm       COMBINE.B      DISPATCH.F   DISPATCH.B   COMBINE.F

Pure: pieces in, order out. Every rank that shares experts weaves the same way, so their collectives meet. Weight
gradients are not woven: they have no order to keep, and are done whenever the compute lane would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moefold.anatomy.step_specs import Lane


@dataclass(frozen=True)
class StrandPiece:
    lane: Lane
    cost: float = 1.0


def interleave_strands(strands: Sequence[Sequence[StrandPiece]]) -> list[tuple[int, int]]:
    """The order in which to begin pieces, as (strand, index): always the one that can begin first, by a simulated
    clock; of several, communication first, then the strand that has more left."""
    free = {"compute": 0.0, "comm": 0.0}
    ended = [0.0] * len(strands)
    at = [0] * len(strands)
    order: list[tuple[int, int]] = []

    def start_priority(s: int) -> tuple[float, bool, float, int]:
        piece = strands[s][at[s]]
        left = sum(piece.cost for piece in strands[s][at[s] :])
        return max(ended[s], free[piece.lane]), piece.lane == "compute", -left, s

    while waiting := [s for s, strand in enumerate(strands) if at[s] < len(strand)]:
        s = min(waiting, key=start_priority)
        piece = strands[s][at[s]]
        free[piece.lane] = ended[s] = start_priority(s)[0] + piece.cost
        order.append((s, at[s]))
        at[s] += 1
    return order
