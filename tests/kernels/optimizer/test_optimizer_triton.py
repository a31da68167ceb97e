"""The optimizer's Triton kernels, run by Triton's interpreter where there is no GPU: the same code by element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.optimizer import optimizer_triton
from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.kernels.optimizer.add_squares import add_squares
from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_triton = adamw.implementations["triton"]
OPTIONS = AdamWOptions(0.9, 0.95, 1e-8, 0.1)


def step_scalars(step: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.tensor(adamw_scalars(step, 1e-2, OPTIONS, seed), dtype=torch.float64, device=DEVICE)


def state(form: str, moments: torch.dtype, gradients: torch.dtype, n: int) -> list[Any]:
    generator = torch.Generator().manual_seed(n)
    main, g, m, v = (torch.randn(n, generator=generator).to(DEVICE) for _ in range(4))
    weights = None if form == "own" else round_to_nearest(main, torch.bfloat16)
    kept = lower_16_bits(main) if form == "split" else main
    return [kept, g.to(gradients), m.to(moments), v.square().to(moments), weights]


@pytest.mark.parametrize("form", ["own", "copy", "split"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("n", [1, 130, 3000])
def test_adamw_equals_the_reference(form, moments, gradients, seed, n):
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    now, options = step_scalars(seed=seed or 0), OPTIONS._replace(stochastic=seed is not None)
    mine, theirs = state(form, moments, gradients, n), state(form, moments, gradients, n)
    in_triton(*mine, scale, now, options)
    adamw(*theirs, scale, now, options)
    if form == "split":
        mine[0], theirs[0] = (joined_fp32(x[4], x[0]) for x in (mine, theirs))
    for a, b in zip(mine, theirs, strict=True):
        if a is None or b is None:
            assert a is b
        else:  # bf16 may fall to the other side where fp32 differs in the last bit, which is rare
            off = (a.double() - b.double()).norm() / b.double().norm()
            assert off <= (1e-6 if a.dtype == torch.float32 else 2e-4), (form, off)


def test_split_fp32_and_a_copy_give_the_same_numbers_to_the_bit():
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    whole, split = (state(form, torch.bfloat16, torch.bfloat16, 3000) for form in ("copy", "split"))
    for x in (whole, split):
        in_triton(*x, scale, step_scalars(), OPTIONS)
    assert torch.equal(lower_16_bits(whole[0]), split[0])
    assert torch.equal(round_to_nearest(whole[0], torch.bfloat16), whole[4])
    assert all(torch.equal(a, b) for a, b in zip(whole[1:], split[1:], strict=True))


def test_the_numbers_of_a_step_are_read_on_the_device():
    """The same launch, with other numbers written to the same tensor, does the other step."""
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    standing = step_scalars(3)
    for step in (3, 50):
        standing.copy_(step_scalars(step))
        mine, theirs = (state("copy", torch.float32, torch.float32, 300) for _ in range(2))
        in_triton(*mine, scale, standing, OPTIONS)
        adamw(*theirs, scale, step_scalars(step), OPTIONS)
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_leaves_everything_as_it_is(scale: float):
    mine, before = (state("split", torch.bfloat16, torch.bfloat16, 300) for _ in range(2))
    in_triton(*mine, torch.tensor(scale, dtype=torch.float64, device=DEVICE), step_scalars(), OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 1025, 40_000])
def test_squares_are_added_to_what_is_there(n: int, dtype: torch.dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE, dtype)
    mine, theirs = (torch.tensor(0.5, dtype=torch.float64, device=DEVICE) for _ in range(2))
    optimizer_triton.launch_add_squares(mine, x, x[: n // 3], x)
    add_squares(theirs, x, x[: n // 3], x)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
