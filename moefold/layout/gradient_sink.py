"""Where a backward writes the gradient of a weight: straight into its place in a flat bucket, if that is free.

Autograd hands a gradient on as it is, so one that was written in its place is found there and need not be moved: for
large weights that saves a pass over memory. One written elsewhere is copied or added, as any other. Where a sum is
there already, a product may add to it itself (`gradient_sum`, for those that can) and give autograd none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LendMemory = Callable[[torch.dtype], "torch.Tensor | None"]


def memory_for_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Memory with the weight's shape and type and without values. A place is lent once in a step: a weight that is
    used twice gets other memory for its second gradient."""
    lend: LendMemory | None = getattr(underlying_parameter(weight), "lend_place", None)
    place = lend(weight.dtype) if lend else None
    return torch.empty_like(weight) if place is None else place.view(weight.shape)


def attach_gradient_sink(weight: torch.Tensor, lend: LendMemory, running: Callable[[], torch.Tensor | None]) -> None:
    """`lend` gives the flat place for a first gradient, or None if it is taken; `running` gives it for a further one to
    be added to, or None where there is none yet."""
    weight.lend_place = lend  # pyright: ignore[reportAttributeAccessIssue]

    def gradient_sum() -> torch.Tensor | None:
        place = running()
        return None if place is None else place.view(weight.shape)

    weight.gradient_sum = gradient_sum  # pyright: ignore[reportAttributeAccessIssue]


def underlying_parameter(weight: torch.Tensor) -> torch.Tensor:
    """The parameter that this is, or a view of."""
    return weight if weight._base is None else weight._base
