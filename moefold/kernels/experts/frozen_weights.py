"""Operands of experts whose weights are frozen: tails of products, and weights that are made some experts at a time.

E experts, R rows in expert order, N outputs, L rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Tail(NamedTuple):
    """What a grouped product is continued with: rows (R, L), and matrices (E, N, L) or (E, L, N) of all experts."""

    low_RL: Tensor
    matrices: Tensor


class HeldWeights(NamedTuple):
    """Weights of all experts of which `load` makes those of a range, `experts` at a time at most."""

    shape: tuple[int, ...]
    experts: int
    load: Callable[[slice], Tensor]


Weights = Tensor | HeldWeights


@runtime_checkable
class HoldsExperts(Protocol):
    """A recipe whose weights are held in a form that products do not read."""

    def held_experts(self, weight: Tensor) -> HeldWeights: ...


def weights_to_read(recipe: object, weight: Tensor) -> Weights:
    return recipe.held_experts(weight) if isinstance(recipe, HoldsExperts) else weight
