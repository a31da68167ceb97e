"""Matrices of a share as a rule for whole matrices needs them: gathered where tp or etp cuts them, and cut again.

Ranks along the cutting axis hold parts of the same matrices, equally large. Each of these ranks gets some of the
matrices whole, in one all-to-all, and sends the parts of the results back in another:

    rank 0   part 0 of matrices a b c d          whole a b                 part 0 of a b c d
                                        gather              scatter
    rank 1   part 1 of matrices a b c d          whole c d                 part 1 of a b c d
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all_no_grad
from moefold.layout.axes import Axis
from moefold.layout.declare import MatrixShape

MatrixCost = Callable[[MatrixShape], float]
MatrixFunction = Callable[[Tensor], Tensor]
Tensors = tuple[Tensor, ...]
TensorsByRank = list[Tensors]
Shape = tuple[int, ...]
ShapesByRank = list[list[Shape]]


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

    def part_shape(self, count: int) -> Shape:
        """The shape of this rank's parts of so many matrices."""
        part = self.parts_NRC.shape[1:]
        return (count, *part)


Batches = Sequence[MatrixBatch]
SpreadBatch = tuple[MatrixBatch, list[int]]  # with the number of matrices that each rank gets


def map_whole_matrices(batches: Batches, cost: MatrixCost, function: MatrixFunction) -> list[Tensor]:
    """The function of whole matrices, applied to each batch: this rank's parts of the results. The work on matrices
    that are cut is shared by the ranks that hold parts, balanced by `cost`."""
    cut = [batch for batch in batches if batch.axis is not None]
    exchange = MatrixExchange(cut, cost)
    whole = exchange.gather()
    results = [function(x_NRC) for x_NRC in whole]
    parts_of_cut = exchange.scatter(results)
    next_cut = iter(parts_of_cut)
    parts: list[Tensor] = []
    for batch in batches:
        if batch.axis is None:
            part = function(batch.parts_NRC)
        else:
            part = next(next_cut)
        parts.append(part)
    return parts


class MatrixExchange:
    """The exchange of matrices that one axis cuts. `spread` has each batch with the number of its matrices that each
    rank gets."""

    def __init__(self, batches: Batches, cost: MatrixCost):
        self.batches = batches
        self.axis = Axis("alone")
        for batch in batches:
            if batch.axis is not None:
                self.axis = batch.axis
        ranks = self.axis.size
        self.spread = spread_matrices(batches, cost, ranks)

    def gather(self) -> list[Tensor]:
        """This rank's matrices of each batch, whole."""
        split: list[Tensors] = []
        for batch, counts in self.spread:
            parts_by_rank = batch.parts_NRC.split(counts)
            split.append(parts_by_rank)
        mine = self.shapes_of_rank(self.axis.index)
        wanted = [mine] * self.axis.size
        to_each = transposed(split)
        from_each = self.exchange(to_each, wanted)
        by_batch = transposed(from_each)
        whole: list[Tensor] = []
        for batch, parts in zip(self.batches, by_batch, strict=True):
            whole_NRC = torch.cat(parts, batch.dim)
            whole.append(whole_NRC)
        return whole

    def scatter(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of all matrices of each batch, from results of the shape that `gather` gave."""
        ranks = self.axis.size
        split: list[Tensors] = []
        for batch, x_NRC in zip(self.batches, whole, strict=True):
            parts_by_rank = x_NRC.chunk(ranks, batch.dim)
            split.append(parts_by_rank)
        every_rank = range(ranks)
        wanted = [*map(self.shapes_of_rank, every_rank)]
        to_each = transposed(split)
        from_each = self.exchange(to_each, wanted)
        by_batch = transposed(from_each)
        return [torch.cat(parts) for parts in by_batch]

    def shapes_of_rank(self, rank: int) -> list[Shape]:
        """The shapes of this rank's parts of the matrices that a rank gets, by batch."""
        shapes: list[Shape] = []
        for batch, counts in self.spread:
            shape = batch.part_shape(counts[rank])
            shapes.append(shape)
        return shapes

    def exchange(self, sent: TensorsByRank, wanted: ShapesByRank) -> TensorsByRank:
        """Tensors to each rank, and tensors of the wanted shapes from each rank, in one all-to-all."""
        if not self.batches:
            return [()]
        all_sent = chain.from_iterable(sent)
        flat = torch.cat([tensor.flatten() for tensor in all_sent])
        send = [count_elements(tensors) for tensors in sent]
        receive = [elements_in(shapes) for shapes in wanted]
        arrived = all_to_all_no_grad(flat, send, receive, self.axis, "matrices")
        parts = arrived.split(receive)
        from_each: TensorsByRank = []
        for part, shapes in zip(parts, wanted, strict=True):
            tensors = unpack_tensors(part, shapes)
            from_each.append(tensors)
        return from_each


def spread_matrices(batches: Batches, cost: MatrixCost, ranks: int) -> list[SpreadBatch]:
    """How many matrices of each batch each rank gets: equally many, and the rest to the ranks of least cost so far."""
    loads = [0.0] * ranks
    spread: list[SpreadBatch] = []
    for batch in batches:
        matrices = len(batch)
        each, rest = divmod(matrices, ranks)
        counts = [each] * ranks
        by_load = [*range(ranks)]
        by_load.sort(key=loads.__getitem__)
        for rank in by_load[:rest]:
            counts[rank] += 1
        matrix_cost = cost(batch.whole)
        for rank, count in enumerate(counts):
            loads[rank] += count * matrix_cost
        spread.append((batch, counts))
    return spread


def count_elements(tensors: Tensors) -> int:
    sizes = [tensor.numel() for tensor in tensors]
    return sum(sizes)


def elements_in(shapes: list[Shape]) -> int:
    sizes = map(prod, shapes)
    return sum(sizes)


def unpack_tensors(flat: Tensor, shapes: list[Shape]) -> Tensors:
    sizes = [prod(shape) for shape in shapes]
    parts = flat.split(sizes)
    tensors: list[Tensor] = []
    for part, shape in zip(parts, shapes, strict=True):
        tensor = part.view(shape)
        tensors.append(tensor)
    return tuple(tensors)


def transposed(tensors: list[Tensors]) -> list[Tensors]:
    """Tensors by rank and batch, of tensors by batch and rank, and the other way round."""
    return list(zip(*tensors, strict=True))
