"""A module declares each parameter once: shape, placement and how it starts. Everything else reads the declaration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moefold.layout.placement import REPLICATED, Placement


@dataclass(frozen=True)
class Declaration:
    """`std` None starts at one (norms), 0 at zero (biases), else normal. `stacked`: dim 0 counts independent
    matrices (experts), each drawn by itself, so that a rank can draw only those it holds."""

    placement: Placement
    std: float | None
    stacked: bool = False

    @property
    def decays(self) -> bool:
        """Weight decay is for what starts random: matrices and embeddings, not norms or biases."""
        return bool(self.std)


class Declaring(nn.Module):
    """A module that owns parameters."""

    def __init__(self):
        super().__init__()
        self.declared: dict[str, Declaration] = {}

    def declare(
        self,
        name: str,
        *shape: int,
        placement: Placement = REPLICATED,
        std: float | None,
        stacked: bool = False,
    ) -> nn.Parameter:
        """An empty parameter on the current default device; `model/initialise.py` fills it by name and seed."""
        self.declared[name] = Declaration(placement, std, stacked)
        return nn.Parameter(torch.empty(*shape))


@dataclass(frozen=True)
class Parameter:
    """A parameter with its full name and its declaration."""

    name: str
    tensor: nn.Parameter
    declaration: Declaration


def declared_parameters(model: nn.Module) -> Iterator[Parameter]:
    """Every parameter of the model, in the model's order; one that nobody declared is a programming error."""
    for prefix, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            if not isinstance(module, Declaring) or name not in module.declared:
                raise TypeError(f"{prefix}.{name} was not declared; create it with Declaring.declare")
            yield Parameter(f"{prefix}.{name}" if prefix else name, tensor, module.declared[name])
