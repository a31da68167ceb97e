"""Matrices of a share as a rule for whole matrices needs them: gathered where tp or etp cuts them, and cut again.

Ranks along the cutting axis hold parts of the same matrices, equally large. Each of these ranks gets some of the
matrices whole, in one all-to-all, and sends the parts of the results back in another:

    rank 0   part 0 of matrices a b c d          whole a b                 part 0 of a b c d
                                        gather              scatter
    rank 1   part 1 of matrices a b c d          whole c d                 part 1 of a b c d
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all_no_grad
from moefold.layout.axes import Axis
from moefold.layout.declare import MatrixShape

MatrixCost = Callable[[MatrixShape], float]
TensorsByRank = list[list[Tensor]]
ShapesByRank = list[list[Sequence[int]]]


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape: `parts_NRC` is this rank's part of each, cut over `axis` along `dim` of (matrix, rows,
    columns), or the matrices themselves where `axis` is None. `whole` is the shape of a whole matrix."""

    parts_NRC: Tensor
    whole: MatrixShape
    axis: Axis | None = None
    dim: int = 0

    def __len__(self) -> int:
        return len(self.parts_NRC)


def map_whole_matrices(
    batches: Sequence[MatrixBatch], cost: MatrixCost, function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The function of whole matrices, applied to each batch: this rank's parts of the results. The work on matrices
    that are cut is shared by the ranks that hold parts, balanced by `cost`."""
    cut = [batch for batch in batches if batch.axis is not None]
    exchange = MatrixExchange(cut, cost)
    whole = exchange.gather()
    results = [function(x_NRC) for x_NRC in whole]
    parts_of_cut = iter(exchange.scatter(results))
    parts: list[Tensor] = []
    for batch in batches:
        parts.append(function(batch.parts_NRC) if batch.axis is None else next(parts_of_cut))
    return parts


class MatrixExchange:
    """The exchange of matrices that one axis cuts. `counts` has for each batch the number of its matrices that each
    rank gets."""

    def __init__(self, batches: Sequence[MatrixBatch], cost: MatrixCost):
        self.batches = batches
        self.axis = next((batch.axis for batch in batches if batch.axis), Axis("alone"))
        self.counts = spread_matrices(batches, cost, self.axis.size)

    def gather(self) -> list[Tensor]:
        """This rank's matrices of each batch, whole."""
        split = [batch.parts_NRC.split(counts) for batch, counts in self.counted_batches()]
        mine = [self.part_shape(batch, counts[self.axis.index]) for batch, counts in self.counted_batches()]
        from_each = self.exchange(by_rank(split), [mine] * self.axis.size)
        joined = zip(self.batches, by_batch(from_each), strict=True)
        return [torch.cat(parts, batch.dim) for batch, parts in joined]

    def scatter(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of all matrices of each batch, from results of the shape that `gather` gave."""
        ranks = range(self.axis.size)
        results = zip(self.batches, whole, strict=True)
        split = [x_NRC.chunk(self.axis.size, batch.dim) for batch, x_NRC in results]
        wanted: ShapesByRank = []
        for rank in ranks:
            wanted.append([self.part_shape(batch, counts[rank]) for batch, counts in self.counted_batches()])
        from_each = self.exchange(by_rank(split), wanted)
        return [torch.cat(parts) for parts in by_batch(from_each)]

    def counted_batches(self) -> Iterator[tuple[MatrixBatch, list[int]]]:
        return zip(self.batches, self.counts, strict=True)

    def part_shape(self, batch: MatrixBatch, count: int) -> Sequence[int]:
        return (count, *batch.parts_NRC.shape[1:])

    def exchange(self, sent: TensorsByRank, wanted: ShapesByRank) -> TensorsByRank:
        """Tensors to each rank, and tensors of the wanted shapes from each rank, in one all-to-all."""
        if not self.batches:
            return [[]]
        flat = torch.cat([tensor.flatten() for tensors in sent for tensor in tensors])
        send = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        receive = [sum(map(prod, shapes)) for shapes in wanted]
        arrived = all_to_all_no_grad(flat, send, receive, self.axis, "matrices")
        from_each = arrived.split(receive)
        return [unpack_tensors(part, shapes) for part, shapes in zip(from_each, wanted, strict=True)]


def spread_matrices(batches: Sequence[MatrixBatch], cost: MatrixCost, ranks: int) -> list[list[int]]:
    """How many matrices of each batch each rank gets: equally many, and the rest to the ranks of least cost so far."""
    loads = [0.0] * ranks
    counts_of_batches: list[list[int]] = []
    for batch in batches:
        each, rest = divmod(len(batch), ranks)
        of_least_cost = sorted(range(ranks), key=loads.__getitem__)
        counts = [each] * ranks
        for rank in of_least_cost[:rest]:
            counts[rank] += 1
        matrix_cost = cost(batch.whole)
        loads = [load + count * matrix_cost for load, count in zip(loads, counts, strict=True)]
        counts_of_batches.append(counts)
    return counts_of_batches


def unpack_tensors(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    sizes = [prod(shape) for shape in shapes]
    parts = flat.split(sizes)
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def by_rank(of_batches: Iterable[Sequence[Tensor]]) -> TensorsByRank:
    """Tensors by rank, of tensors by batch and rank."""
    return [list(tensors) for tensors in zip(*of_batches, strict=True)]


def by_batch(of_ranks: TensorsByRank) -> TensorsByRank:
    """Tensors by batch, of tensors by rank and batch."""
    return [list(tensors) for tensors in zip(*of_ranks, strict=True)]
