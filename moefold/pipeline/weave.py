"""Weaving strands of work into one order, so that communication of one faces compute of another.

A strand is a chain: each piece waits for the one before it. Pieces of the comm lane run beside those of the compute
lane. A forward, and the backward of another microbatch, of one MoE layer (weight gradients as a third strand, which
fills what is left):

    forward    attend route DISPATCH shared experts COMBINE
    backward   COMBINE experts shared DISPATCH route attend

    compute    attend.F  experts.B  route.F  shared.B  shared.F  route.B  experts.F  attend.B  weights ...
    comm       COMBINE.B            DISPATCH.F         DISPATCH.B         COMBINE.F

Pure: pieces in, order out. Every rank that shares experts weaves the same way, so their collectives meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moefold.anatomy.steps import Lane


@dataclass(frozen=True)
class Piece:
    """`after`: a piece of another strand, as (strand, index), that must have run."""

    lane: Lane
    cost: float = 1.0
    after: tuple[int, int] | None = None


def weave(strands: Sequence[Sequence[Piece]], fillers: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The order in which to begin pieces, as (strand, index): always the one that can begin first, by a simulated
    clock; of several, communication first, then the earlier strand. Strands that are `fillers` only take what is left.
    """
    free = {"compute": 0.0, "comm": 0.0}
    ends: dict[tuple[int, int], float] = {}
    at = [0] * len(strands)
    order: list[tuple[int, int]] = []
    while candidates := [s for s, strand in enumerate(strands) if at[s] < len(strand)]:
        best: tuple[float, bool, bool, int] | None = None
        for s in candidates:
            piece = strands[s][at[s]]
            if piece.after is not None and piece.after not in ends:
                continue
            ready = max(ends.get((s, at[s] - 1), 0.0), ends[piece.after] if piece.after else 0.0)
            start = max(ready, free[piece.lane])
            key = (start, s in fillers, piece.lane == "compute", s)
            best = min(best, key) if best else key
        if best is None:
            raise ValueError(f"strands {candidates} wait for each other")
        start, *_, s = best
        piece = strands[s][at[s]]
        free[piece.lane] = ends[s, at[s]] = start + piece.cost
        order.append((s, at[s]))
        at[s] += 1
    return order
