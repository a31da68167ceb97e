"""The write plan of a checkpoint: every element of every logical tensor is written once, by a rank that holds it, with
the bytes spread over ranks as evenly as possible. Torch-free.

Rank 0 gets the holdings of all ranks and computes the plan; every rank gets its own part of it. The plan stays valid
while holdings stay the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from moefold.checkpoint.format.boxes import Box, Range, contiguous_range, element_count
from moefold.checkpoint.format.ledger import HashPiece, TensorSpec, TensorSpecs, hash_pieces

RankHoldings = Mapping[str, tuple[TensorSpec, Sequence[Box]]]  # of one rank: for each tensor the boxes that it holds
ChunkKey = tuple[str, Box]  # a box of a tensor
WrittenBox = tuple[Box, int]  # a box and the rank that writes it
BoxHolders = dict[ChunkKey, list[int]]


@dataclass(frozen=True)
class RankPlan:
    """What one rank writes: its chunks, in the order of its file, and the specs of their tensors."""

    chunks: list[ChunkKey]
    specs: dict[str, TensorSpec]


@dataclass(frozen=True)
class WritePlan:
    specs: dict[str, TensorSpec]
    chunks: dict[str, list[WrittenBox]] = field(default_factory=dict)  # by tensor

    @property
    def bytes(self) -> int:
        specs = self.specs.values()
        sizes = [spec.bytes for spec in specs]
        return sum(sizes)

    def plans_of_ranks(self, ranks: int) -> list[RankPlan]:
        """The part of every rank."""
        every_rank = range(ranks)
        chunks_by_rank: list[list[ChunkKey]] = [[] for _ in every_rank]
        for name, chunks in self.chunks.items():
            for box, writer in chunks:
                chunks_by_rank[writer].append((name, box))
        return list(map(self.plan_of_chunks, chunks_by_rank))

    def plan_of_chunks(self, chunks: list[ChunkKey]) -> RankPlan:
        """Chunks of wide elements first, so that all are aligned in the file."""
        ordered = sorted(chunks, key=self.file_order)
        specs = {name: self.specs[name] for name, _ in ordered}
        return RankPlan(ordered, specs)

    def file_order(self, chunk: ChunkKey) -> tuple[int, str, Box]:
        name, box = chunk
        itemsize = self.specs[name].itemsize
        return -itemsize, name, box

    def writers(self, name: str) -> set[int]:
        """The ranks that write a tensor."""
        return {writer for _, writer in self.chunks[name]}

    def split_pieces(self) -> Iterator[tuple[str, HashPiece]]:
        """Pieces that no chunk contains as one contiguous run: these are hashed from the files."""
        for name, spec in self.specs.items():
            runs = self.contiguous_runs(name)
            starts = [first for first, _ in runs]
            for piece in hash_pieces(spec):
                # The last run that begins at or before the piece is the only one that can contain it.
                candidate = bisect_right(starts, piece.first) - 1
                if candidate < 0 or sum(runs[candidate]) < piece.last:
                    yield name, piece

    def contiguous_runs(self, name: str) -> list[Range]:
        """(first, count) of every chunk of a tensor that is contiguous in the flattened tensor, sorted."""
        shape = self.specs[name].shape
        runs: list[Range] = []
        for box, _ in self.chunks[name]:
            run = contiguous_range(box, shape)
            if run:
                runs.append(run)
        return sorted(runs)


def assign_writers(holdings: Sequence[RankHoldings]) -> WritePlan:
    """The plan for these holdings, one entry per rank. A box that several ranks hold goes to the one that has the
    fewest bytes so far."""
    specs: dict[str, TensorSpec] = {}
    for held in holdings:
        for name, (spec, _) in held.items():
            specs[name] = spec
    holders = holders_of_boxes(holdings, specs)

    def bytes_of(chunk: ChunkKey) -> int:
        name, box = chunk
        return element_count(box) * specs[name].itemsize

    chunks: dict[str, list[WrittenBox]] = {name: [] for name in specs}
    load = [0] * len(holdings)  # bytes of each rank
    # Largest first: the small ones at the end even out the load.
    by_name = sorted(holders)
    for chunk in sorted(by_name, key=bytes_of, reverse=True):
        writer = min(holders[chunk], key=load.__getitem__)
        load[writer] += bytes_of(chunk)
        name, box = chunk
        chunks[name].append((box, writer))
    ordered = dict(sorted(specs.items()))
    plan = WritePlan(ordered, chunks)
    require_complete(plan)
    return plan


def holders_of_boxes(holdings: Sequence[RankHoldings], specs: TensorSpecs) -> BoxHolders:
    """The ranks that hold each box."""
    holders: BoxHolders = {}
    for rank, held in enumerate(holdings):
        for name, (spec, boxes) in held.items():
            if spec != specs[name]:
                raise ValueError(f'"{name}" is {spec} on rank {rank} and {specs[name]} on another')
            for box in filter(element_count, boxes):
                ranks = holders.setdefault((name, box), [])
                ranks.append(rank)
    return holders


def require_complete(plan: WritePlan) -> None:
    for name, spec in plan.specs.items():
        boxes = [box for box, _ in plan.chunks[name]]
        written = sum(map(element_count, boxes))
        expected = prod(spec.shape)
        if written != expected:
            raise ValueError(f'ranks hold {written} of {expected} values of "{name}"')


def pieces_inside_box(box: Box, spec: TensorSpec) -> Iterator[tuple[HashPiece, int]]:
    """The pieces of a tensor that a box contains as one contiguous run, with the offset of each in the box."""
    run = contiguous_range(box, spec.shape)
    if run is None:
        return
    first, count = run
    last = first + count
    for piece in hash_pieces(spec):
        if first <= piece.first and piece.last <= last:
            yield piece, piece.first - first
