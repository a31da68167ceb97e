"""Who writes what: every element of every logical tensor once, by a rank that holds it, as evenly as possible.

Every rank knows what all hold, so all make the same plan; it serves as long as nobody's holdings change.
Torch-free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from moefold.checkpoint.format.boxes import Box, contiguous_range, element_count
from moefold.checkpoint.format.ledger import HashPiece, TensorSpec, hash_pieces

RankHoldings = Mapping[str, tuple[TensorSpec, Sequence[Box]]]  # what one rank holds: of each tensor some boxes


@dataclass(frozen=True)
class WritePlan:
    shapes: dict[str, TensorSpec]
    chunks: dict[str, list[tuple[Box, int]]] = field(default_factory=dict)  # of each tensor: boxes and their writers

    @property
    def bytes(self) -> int:
        return sum(what.bytes for what in self.shapes.values())

    def of(self, rank: int) -> list[tuple[str, Box]]:
        """What a rank writes, wide elements first, so that all are aligned."""
        mine = [(name, box) for name, chunks in self.chunks.items() for box, writer in chunks if writer == rank]
        return sorted(mine, key=lambda chunk: (-self.shapes[chunk[0]].itemsize, *chunk))

    def split_pieces(self) -> Iterator[tuple[str, HashPiece]]:
        """Pieces that no rank writes in one run: they are hashed from the files."""
        for name, what in self.shapes.items():
            runs = sorted(run for box, _ in self.chunks[name] if (run := contiguous_range(box, what.shape)))
            starts = [first for first, _ in runs]
            for piece in hash_pieces(what):
                before = bisect_right(starts, piece.first) - 1
                if before < 0 or sum(runs[before]) < piece.last:
                    yield name, piece


def assign_writers(held: Sequence[RankHoldings]) -> WritePlan:
    """What each rank writes. Boxes that several ranks hold go to the one that has the least so far."""
    shapes = {name: what for holdings in held for name, (what, _) in holdings.items()}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, holdings in enumerate(held):
        for name, (what, boxes) in holdings.items():
            if what != shapes[name]:
                raise ValueError(f'"{name}" is {what} on rank {rank} and {shapes[name]} on another')
            for box in filter(element_count, boxes):
                holders.setdefault((name, box), []).append(rank)
    plan, load = WritePlan(dict(sorted(shapes.items())), {name: [] for name in shapes}), [0] * len(held)
    sized = {(name, box): element_count(box) * shapes[name].itemsize for name, box in holders}
    for name, box in sorted(holders, key=lambda chunk: (-sized[chunk], *chunk)):
        writer = min(holders[name, box], key=lambda rank: load[rank])
        load[writer] += sized[name, box]
        plan.chunks[name].append((box, writer))
    for name, what in shapes.items():
        written = sum(element_count(box) for box, _ in plan.chunks[name])
        if written != prod(what.shape):
            raise ValueError(f'ranks hold {written} of {prod(what.shape)} values of "{name}"')
    return plan


def pieces_inside_box(box: Box, what: TensorSpec) -> Iterator[tuple[HashPiece, int]]:
    """The pieces of a tensor that lie in a box as one run each, with the place in the box where each begins."""
    run = contiguous_range(box, what.shape)
    if run is None:
        return
    first, last = run[0], sum(run)
    for piece in hash_pieces(what):
        if first <= piece.first and piece.last <= last:
            yield piece, piece.first - first
