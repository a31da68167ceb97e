"""Gradients in blocks, accumulated over microbatches: how far 500 steps drift, and what AdamW makes of them."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.kernels.optimizer.state_blocks import STATE_BLOCK
from moefold.layout.axes import single_rank_world
from moefold.optim.optimizer import build_optimizer
from moefold.shard.buckets import fill_buckets
from moefold.shard.gradient_sums import BlockSums, GradientSums
from tests.optim.test_adamw import OPTIM, make, torch_optimizer
from tests.optim.test_main_weights import kernels_of

OPTIONS = AdamWOptions(0.9, 0.95, 1e-8, 0.0)
STEPS = 500
SIZE = 16 * STATE_BLOCK
BOUNDS = {"bf16": (0.0, 0.002), "fp16": (0.0005, 0.0005), "int8": (0.005, 0.01), "fp8": (0.008, 0.015)}


def sums_of(kind: str) -> GradientSums:
    where = ([(0, SIZE)], SIZE, torch.device("cpu"))
    plain = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return GradientSums(*where, plain[kind]) if kind in plain else BlockSums(*where, kind)


@lru_cache(maxsize=2)
def drifts(microbatches: int) -> dict[str, float]:
    """How far weights end from those with fp32 gradients, as a share of the way that these went."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(torch.randn(SIZE, generator=generator)) * 1e-4
    trend = 0.3 * torch.randn(SIZE, generator=generator) / microbatches**0.5
    states = {kind: [torch.zeros(SIZE) for _ in range(3)] for kind in ("fp32", *BOUNDS)}
    sums = {kind: sums_of(kind) for kind in states}
    one = torch.ones((), dtype=torch.float64)
    for step in range(1, STEPS + 1):
        scalars = torch.tensor(adamw_scalars(step, 1e-3, OPTIONS), dtype=torch.float64)
        for each in sums.values():
            each.release()
        for _ in range(microbatches):
            gradient = spread * (trend + torch.randn(SIZE, generator=generator))
            for each in sums.values():
                each.add(0, gradient.to(torch.bfloat16))
        for kind, (w, m, v) in states.items():
            adamw(w, sums[kind].whole(), m, v, None, one, scalars, OPTIONS)
    exact = states["fp32"][0]
    return {kind: ((states[kind][0] - exact).norm() / exact.norm()).item() for kind in BOUNDS}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("microbatches", [1, 8])
def test_the_error_of_500_steps_against_fp32_gradients_is_bounded(kind: str, microbatches: int):
    found = drifts(microbatches)[kind]
    print(f"{kind}, {microbatches} microbatches: {found:.5f}")
    assert found <= BOUNDS[kind][microbatches > 1]


@pytest.mark.parametrize(("gradients", "bound"), [("fp16", 0.009), ("int8", 0.03), ("fp8", 0.05)])
@pytest.mark.parametrize("force", [(), ("adamw=reference",)], ids=["chosen", "reference"])
def test_five_steps_are_those_of_torch_on_fp32_within_the_types_resolution(gradients, bound, force):
    """The distance over the way; the rounding of the model's bf16 weights is a part of it."""
    model = make("bf16")
    buckets = fill_buckets(model, single_rank_world(), gradients=gradients)
    optimizer = build_optimizer(buckets, OPTIM, kernels_of("fp32", gradients, force))
    theirs = make("bf16").float()
    before = torch.cat([p.detach().flatten().clone() for p in theirs.parameters()])
    expected = torch_optimizer(theirs)
    named = dict(theirs.named_parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 6):
        for bucket in buckets:
            bucket.sums.release()
            for number, parameter in enumerate(bucket.parameters):
                gradient = torch.randn(parameter.tensor.shape, generator=generator)
                bucket.sums.add(number, gradient)
                named[parameter.name].grad = gradient
        expected.step()
        optimizer.step(step, OPTIM.lr)
    mine = torch.cat([p.detach().flatten().float() for p in model.parameters()])
    right = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    off = ((mine - right).norm() / (right - before).norm()).item()
    print(f"{gradients}: {off:.4f}")
    assert off < bound
