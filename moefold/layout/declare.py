"""A module declares each parameter once: shape, placement and how it starts. Everything else reads the declaration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moefold.layout.axes import World
from moefold.layout.placement import REPLICATED, Placement


@dataclass(frozen=True)
class Declaration:
    """`shape` is that of the whole tensor, over all ranks. `std` None starts at one (norms), 0 at zero (biases), else
    normal. `stacked`: dim 0 counts independent matrices (experts), each drawn by itself, so that a rank can draw only
    those it holds."""

    shape: tuple[int, ...]
    placement: Placement
    std: float | None
    stacked: bool = False

    def part(self, world: World) -> list[tuple[int, int]]:
        """Where this rank's part lies in the whole: (start, size) along every dim."""
        cuts = [(0, size) for size in self.shape]
        for dim, name in self.placement.cut:
            axis = world.axis(name)
            size, rest = divmod(self.shape[dim], axis.size)
            if rest:
                raise ValueError(f"dim {dim} of {self.shape} does not split over {name} of size {axis.size}")
            cuts[dim] = (axis.index * size, size)
        return cuts

    @property
    def decays(self) -> bool:
        """Weight decay is for what starts random: matrices and embeddings, not norms or biases."""
        return bool(self.std)


class DeclaringModule(nn.Module):
    """A module that owns parameters."""

    def __init__(self, world: World):
        super().__init__()
        self.world = world
        self.declared: dict[str, Declaration] = {}
        self.borrowed: tuple[nn.Parameter, ...] = ()  # parameters of other modules that it reads when it is called

    def declare_parameter(
        self,
        name: str,
        *shape: int,
        placement: Placement = REPLICATED,
        std: float | None,
        stacked: bool = False,
    ) -> nn.Parameter:
        """This rank's part of a parameter of that (whole) shape, empty; `model/initialise.py` fills it."""
        self.declared[name] = made = Declaration(shape, placement, std, stacked)
        return nn.Parameter(torch.empty([size for _, size in made.part(self.world)]))


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter with its full name, its declaration, and where this rank's part lies: (start, size) of each dim."""

    name: str
    tensor: nn.Parameter
    declaration: Declaration
    part: list[tuple[int, int]]


def declared_parameters(model: nn.Module) -> Iterator[DeclaredParameter]:
    """Every parameter of the model, in the model's order; one that nobody declared is a programming error."""
    for prefix, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if not isinstance(module, DeclaringModule) or name not in module.declared:
                raise TypeError(f"{prefix}.{name} was not declared; create it with DeclaringModule.declare_parameter")
            made = module.declared[name]
            yield DeclaredParameter(f"{prefix}.{name}" if prefix else name, tensor, made, made.part(module.world))
