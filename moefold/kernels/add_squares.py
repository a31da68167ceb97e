"""The sum of the squares of a flat tensor's elements, added to a running total in fp64: the gradient norm's share."""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op_in_place, random


@op_in_place
def add_squares(total: torch.Tensor, x: torch.Tensor) -> None:
    total += torch.linalg.vector_norm(x, dtype=torch.float64).square()


@add_squares.fast("triton")
def _(total: torch.Tensor, x: torch.Tensor) -> None:
    from moefold.kernels import optimizer_kernels

    optimizer_kernels.add_squares(total, x)


@add_squares.cases
def _(device: str, dtype: torch.dtype):
    for n in (0, 1, 33, 100_003):
        total = torch.tensor(0.25, dtype=torch.float64, device=device)
        yield Case(f"{n} elements", (total, random(device, dtype, n)))
