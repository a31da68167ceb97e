"""Sums of squares of flat tensors, added to a running total in fp64: this rank's summand of the gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op


@register_in_place_op
def add_squares(total: Tensor, *flats: Tensor) -> None:
    for x in flats:
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
        total += norm.square()


@add_squares.register_fast("triton")
def add_squares_triton(total: Tensor, *flats: Tensor) -> None:
    from moefold.kernels.optimizer import optimizer_triton

    optimizer_triton.launch_add_squares(total, *flats)


SQUARES_SIZES = [  # elements of each tensor
    (0,),
    (1,),
    (33,),
    (100_003,),
    (40_000, 0, 7),
]


@add_squares.register_cases
def add_squares_cases(draw: CaseInputs) -> Cases:
    for sizes in SQUARES_SIZES:
        total = torch.tensor(0.25, dtype=torch.float64, device=draw.device)
        flats = [draw.normal(n, seed=i) for i, n in enumerate(sizes)]
        name = " and ".join(map(str, sizes))
        yield KernelCase(f"{name} elements", (total, *flats))
