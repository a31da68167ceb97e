"""Where a backward writes the gradient of a weight: straight into its place in a flat bucket, if that is free.

Autograd hands a gradient on as it is, so one that was written in its place is found there and need not be moved: for
large weights that saves a pass over memory. One written elsewhere is copied or added, as any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Lend = Callable[[torch.dtype], "torch.Tensor | None"]


def memory_for_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Memory with the weight's shape and type and without values. A place is lent once in a step: a weight that is
    used twice gets other memory for its second gradient."""
    lend: Lend | None = getattr(leaf_of(weight), "lend_place", None)
    place = lend(weight.dtype) if lend else None
    return torch.empty_like(weight) if place is None else place.view(weight.shape)


def offer_place(weight: torch.Tensor, lend: Lend) -> None:
    """From now on `memory_for_gradient` asks here. `lend` gives the flat place, or None if it is taken."""
    weight.lend_place = lend  # pyright: ignore[reportAttributeAccessIssue]


def leaf_of(weight: torch.Tensor) -> torch.Tensor:
    """The parameter that this is, or a view of."""
    return weight if weight._base is None else weight._base
