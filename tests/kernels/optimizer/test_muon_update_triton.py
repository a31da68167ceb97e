"""Muon's Triton kernels, run by Triton's interpreter where there is no GPU: the same numbers as the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.optimizer.muon_scalars import MuonOptions, MuonScalars
from moefold.kernels.optimizer.muon_update import muon_momentum, muon_weights
from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
momentum_in_triton = muon_momentum.implementations["triton"]
weights_in_triton = muon_weights.implementations["triton"]
PASSES = [(momentum_in_triton, weights_in_triton), (muon_momentum, muon_weights)]
SCALARS = MuonScalars(lr=1e-2, keep=0.98, seed=5)


def numbers(scale: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    wide = {"dtype": torch.float64, "device": DEVICE}
    return torch.tensor(scale, **wide), torch.tensor(SCALARS, **wide)


def random_tensors(n: int, *dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=generator).to(DEVICE, dtype) for dtype in dtypes]


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    """bf16 may fall to the other side where fp32 differs in the last bit, which is rare."""
    off = (a.double() - b.double()).norm() / b.double().norm()
    assert off <= (1e-6 if a.dtype == torch.float32 else 2e-4), (a.dtype, off)


@pytest.mark.parametrize("momentum", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [MuonOptions(0.95, True, True), MuonOptions(0.8, False)])
def test_momentum_and_direction_equal_the_reference(momentum, direction, options):
    mine, theirs = (random_tensors(3000, direction, momentum, torch.bfloat16) for _ in range(2))
    momentum_in_triton(*mine, *numbers(), options, 256)
    muon_momentum(*theirs, *numbers(), options, 256)
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b)


def weights_in_form(form: str, n: int) -> list[Any]:
    main, orthogonal = random_tensors(n, torch.float32, torch.bfloat16)
    rounded = round_to_nearest(main, torch.bfloat16)
    forms = {"own": (main, None), "copy": (main, rounded), "split": (lower_16_bits(main), rounded)}
    forms["none"] = (rounded, None)
    return [*forms[form], orthogonal]


@pytest.mark.parametrize("form", ["own", "copy", "split", "none"])
@pytest.mark.parametrize("n", [1, 3000])
def test_weights_equal_the_reference(form: str, n: int):
    mine, theirs = weights_in_form(form, n), weights_in_form(form, n)
    weights_in_triton(*mine, 2.5, *numbers(), 256)
    muon_weights(*theirs, 2.5, *numbers(), 256)
    if form == "split":
        mine[0], theirs[0] = (joined_fp32(x[1], x[0]) for x in (mine, theirs))
    for a, b in zip(mine, theirs, strict=True):
        assert a is b is None or assert_close(a, b) is None


@pytest.mark.parametrize(("momentum", "weights"), PASSES)
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_no_number_moves_nothing(scale: float, momentum, weights):
    direction, kept, g = random_tensors(300, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    before = kept.clone()
    momentum(direction, kept, g, *numbers(scale), MuonOptions(0.95, True, True))
    assert torch.equal(kept, before)
    assert not direction.any(), "Newton-Schulz of zeros is zeros"
    for form in ("copy", "split", "none"):
        state, untouched = weights_in_form(form, 300), weights_in_form(form, 300)
        weights(*state, 2.5, *numbers(scale))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(state, untouched, strict=True))


@pytest.mark.parametrize(("momentum", "weights"), PASSES)
def test_an_update_in_parts_rounds_stochastically_as_the_whole(momentum, weights):
    options = MuonOptions(0.95, True, True)
    whole, parts = (random_tensors(3000, torch.bfloat16, torch.bfloat16, torch.float32) for _ in range(2))
    moved, moved_in_parts = (weights_in_form("none", 3000) for _ in range(2))
    momentum(*whole, *numbers(), options)
    weights(*moved, 2.5, *numbers())
    for window in (slice(0, 1280), slice(1280, 3000)):
        momentum(*(x[window] for x in parts), *numbers(), options, window.start)
        main, _, orthogonal = moved_in_parts
        weights(main[window], None, orthogonal[window], 2.5, *numbers(), window.start)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert torch.equal(moved[0], moved_in_parts[0])
