"""Declarations of parameters: shape, placement and initial spread, stated once by the module that owns the parameter.

Initialisation, gradient buckets, optimizer, checkpoints and name tables read the declaration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from moefold.layout.axes import World
from moefold.layout.placement import REPLICATED, Placement

MatrixShape = tuple[int, int]  # (rows, columns)
RowMeaning = Literal["outputs", "gate_up", "heads", "words"]


class MatrixCut(NamedTuple):
    """The axis that cuts a matrix, along its rows (dim 0) or its columns (dim 1)."""

    axis: str
    dim: int


@dataclass(frozen=True)
class Declaration:
    """`shape` is that of the logical tensor, over all ranks. `std` None starts at one (norms), 0 at zero (biases), else
    normal. `stacked`: dim 0 counts independent matrices (experts), each drawn by itself, so that a rank can draw only
    the matrices it holds. `rows`: what the dims before the last are, apart from a stack's: outputs of a linear layer,
    gate and up (two matrices stored together), heads by width, or the words of a vocabulary."""

    shape: tuple[int, ...]
    placement: Placement
    std: float | None
    stacked: bool = False
    rows: RowMeaning = "outputs"

    def part(self, world: World) -> list[tuple[int, int]]:
        """This rank's part of the logical tensor: (start, size) along every dim."""
        cuts = [(0, size) for size in self.shape]
        for dim, name in self.placement.cut:
            axis = world.axis(name)
            whole = self.shape[dim]
            size, rest = divmod(whole, axis.size)
            if rest:
                raise ValueError(f"dim {dim} of {self.shape} does not split over {name} of size {axis.size}")
            cuts[dim] = (axis.index * size, size)
        return cuts

    @property
    def decays(self) -> bool:
        """Weight decay applies to parameters that start random: matrices and embeddings, not norms or biases."""
        return bool(self.std)

    @property
    def matrix(self) -> MatrixShape | None:
        """The logical matrix, over all ranks; None for norms and biases."""
        return self.matrix_within(self.shape)

    def matrix_within(self, shape: Sequence[int]) -> MatrixShape | None:
        """The matrix in a tensor of that shape, which has the dims of this declaration: the last dim is the columns,
        the dims before it are the rows. (heads, width, hidden) is (heads * width, hidden); of a stack, and of gate and
        up, it is the shape of one matrix."""
        if not self.decays:
            return None
        dims = shape[self.counting_dims :]
        if len(dims) < 2:
            return None
        rows = prod(dims[:-1])
        return rows, dims[-1]

    @property
    def counting_dims(self) -> int:
        """How many of the first dims count matrices."""
        return int(self.stacked) + int(self.rows == "gate_up")

    @property
    def matrix_cut(self) -> MatrixCut | None:
        """Where the placement cuts each matrix; None where a rank holds whole matrices. Rows are cut into blocks: the
        cut dim is the first of the rows."""
        last = len(self.shape) - 1
        for dim, axis in self.placement.cut:
            if dim >= self.counting_dims:
                return MatrixCut(axis, int(dim == last))
        return None


class PartOfTensor(NamedTuple):
    """This rank's part of a tensor that is no parameter but is cut over ranks as one: the logical shape, and (start,
    size) of the part along every dim."""

    tensor: Tensor
    shape: tuple[int, ...]
    part: list[tuple[int, int]]


WITHOUT_MEMORY: list[bool] = []  # not empty while parameters are declared without memory


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Parameters that are declared inside have a shape and no memory: whoever fills buckets gives them some."""
    WITHOUT_MEMORY.append(True)
    try:
        yield
    finally:
        WITHOUT_MEMORY.pop()


class DeclaringModule(nn.Module):
    """A module that owns parameters."""

    def __init__(self, world: World):
        super().__init__()
        self.world = world
        self.declared: dict[str, Declaration] = {}
        self.borrowed: tuple[nn.Parameter, ...] = ()  # parameters of other modules that its forward reads

    def declare_parameter(
        self,
        name: str,
        *shape: int,
        placement: Placement = REPLICATED,
        std: float | None,
        stacked: bool = False,
        rows: RowMeaning = "outputs",
    ) -> nn.Parameter:
        """This rank's part of a parameter of that logical shape, without values; `model/initialise.py` fills it."""
        declaration = Declaration(shape, placement, std, stacked, rows)
        self.declared[name] = declaration
        part = declaration.part(self.world)
        sizes = [size for _, size in part]
        parameter = nn.Parameter(torch.empty(sizes))
        if WITHOUT_MEMORY:
            parameter.untyped_storage().resize_(0)
        return parameter

    def parameters_read(self) -> Iterator[nn.Parameter]:
        """What a call of the module reads, but for what calls of its parts read: the call waits until it is here."""
        yield from self.parameters(recurse=False)
        yield from self.borrowed


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter with its full name, its declaration, and this rank's part of it: (start, size) of each dim."""

    name: str
    tensor: nn.Parameter
    declaration: Declaration
    part: list[tuple[int, int]]

    @property
    def matrix(self) -> MatrixShape | None:
        """The matrix that this rank holds: the logical matrix, cut where the placement cuts its rows or columns."""
        return self.declaration.matrix_within(self.tensor.shape)


def declared_parameters(model: nn.Module) -> Iterator[DeclaredParameter]:
    """Every parameter of the model, in the model's order. A parameter without a declaration is a programming error."""
    for prefix, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            if not isinstance(module, DeclaringModule) or name not in module.declared:
                raise TypeError(f"{full_name} was not declared; create it with DeclaringModule.declare_parameter")
            declaration = module.declared[name]
            part = declaration.part(module.world)
            yield DeclaredParameter(full_name, tensor, declaration, part)
