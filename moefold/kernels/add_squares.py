"""The sum of the squares of flat tensors' elements, added to a running total in fp64: the gradient norm's share."""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op_in_place, random


@op_in_place
def add_squares(total: torch.Tensor, *flats: torch.Tensor) -> None:
    for x in flats:
        total += torch.linalg.vector_norm(x, dtype=torch.float64).square()


@add_squares.fast("triton")
def _(total: torch.Tensor, *flats: torch.Tensor) -> None:
    from moefold.kernels import optimizer_kernels

    optimizer_kernels.add_squares(total, *flats)


@add_squares.cases
def _(device: str, dtype: torch.dtype):
    for sizes in ((0,), (1,), (33,), (100_003,), (40_000, 0, 7)):
        total = torch.tensor(0.25, dtype=torch.float64, device=device)
        flats = (random(device, dtype, n, seed=i) for i, n in enumerate(sizes))
        yield Case(f"{' and '.join(map(str, sizes))} elements", (total, *flats))
