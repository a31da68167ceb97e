"""Moments in types of their own: what a block keeps, how far 500 steps drift, and bf16 weights without main weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.kernels.optimizer.state_blocks import STATE_BLOCK, block_dtypes, decode_blocks, encode_blocks
from moefold.optim.moments import new_moment
from moefold.shard.block_values import BlockValues
from tests.optim.test_adamw import OPTIM, copied, make_both, named, put_gradients

BLOCK_TYPES = ("fp16", "fp8", "int8")
OPTIONS = AdamWOptions(0.9, 0.95, 1e-8, 0.0)


def encoded(x: torch.Tensor, moments: str, is_second: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dtypes = block_dtypes(moments)
    assert dtypes is not None
    return encode_blocks(x, dtypes[is_second], is_second)


def spread_values(seed: int, sigma: float, n: int = 64 * STATE_BLOCK) -> torch.Tensor:
    """Values whose magnitudes differ by factors of e^sigma."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(sigma * torch.randn(n, generator=generator))
    return magnitudes * torch.randn(n, generator=generator) * 1e-4


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("moments", BLOCK_TYPES)
@pytest.mark.parametrize("seed", range(5))
def test_decoded_values_are_encoded_as_the_same_codes_and_scales(moments: str, seed: int, is_second: bool):
    x = spread_values(seed, 1.0 + seed)
    x = x.square() if is_second else x
    codes, scales = encoded(x, moments, is_second)
    again, same_scales = encoded(decode_blocks(codes, scales, is_second), moments, is_second)
    assert torch.equal(scales, same_scales)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize(("moments", "bound"), [("fp16", 0.001), ("fp8", 0.07), ("int8", 0.035)])
@pytest.mark.parametrize("is_second", [False, True])
def test_the_error_of_a_block_is_bounded(moments: str, bound: float, is_second: bool):
    """Of magnitudes above a thousandth of the block's largest root; int8 is at its best near the largest."""
    x = spread_values(0, 1.0)
    root = x.abs()
    codes, scales = encoded(x.square() if is_second else x, moments, is_second)
    found = decode_blocks(codes, scales, is_second)
    found = found.sqrt() if is_second else found.abs()
    large = root > 0.05 * scales.repeat_interleave(STATE_BLOCK)
    assert ((found - root).abs() / root)[large].max() < bound


@pytest.mark.parametrize("moments", BLOCK_TYPES)
def test_a_root_of_a_block_with_values_is_never_zero(moments: str):
    x = torch.zeros(2 * STATE_BLOCK)
    x[0] = 1.0
    codes, scales = encoded(x, moments, is_second=True)
    values = decode_blocks(codes, scales, is_second=True)
    assert (values[:STATE_BLOCK] > 0).all()
    assert values[0] == 1
    assert (values[STATE_BLOCK:] == 0).all(), "a block of zeros stays so"


@pytest.mark.parametrize("is_second", [False, True])
def test_a_moment_is_read_and_written_in_parts(is_second: bool):
    x = spread_values(3, 1.0, 5 * STATE_BLOCK).square()
    moment = new_moment("int8", torch.empty(len(x)), torch.float32, is_second)
    assert isinstance(moment, BlockValues)
    moment.put(0, len(x), x)
    whole = moment.get(0, len(x))
    part = moment[100:500]
    assert len(part) == 400
    assert torch.equal(part.get(10, 300), whole[110:400])
    other = new_moment("int8", torch.empty(len(x)), torch.float32, is_second)
    assert isinstance(other, BlockValues)
    for first, last in ((0, 60), (60, 333), (333, 640)):  # as a checkpoint's boxes may lie
        other[first:last].put(0, last - first, whole[first:last])
    assert torch.equal(other.codes, moment.codes)
    assert torch.equal(other.scales, moment.scales)
    assert moment.nbytes == len(x) + 4 * len(x) // STATE_BLOCK


def drift_after_500_steps(moments: str, sigma: float) -> float:
    """How far weights end from those with fp32 moments, as a share of the way that these went."""
    n = 64 * STATE_BLOCK
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(sigma * torch.randn(n, generator=generator)) * 1e-4
    trend = 0.3 * torch.randn(n, generator=generator)
    states: list[list[Any]] = []
    for name in ("fp32", moments):
        first, second = (new_moment(name, torch.empty(n), torch.float32, is_second) for is_second in (False, True))
        states.append([torch.zeros(n), first, second])
    one = torch.ones((), dtype=torch.float64)
    for step in range(1, 501):
        g = spread * (trend + torch.randn(n, generator=generator))
        scalars = torch.tensor(adamw_scalars(step, 1e-3, OPTIONS), dtype=torch.float64)
        for w, m, v in states:
            tensors = [(x.codes, x.scales) if isinstance(x, BlockValues) else (x, None) for x in (m, v)]
            (m_values, m_scales), (v_values, v_scales) = tensors
            adamw(w, g, m_values, v_values, None, one, scalars, OPTIONS, 0, m_scales, v_scales)
    exact, found = states[0][0], states[1][0]
    return ((found - exact).norm() / exact.norm()).item()


BOUNDS = [  # type, and the error after 500 steps: magnitudes in a block differ by e^0.5, e^1, e^2
    ("bf16", (0.01, 0.01, 0.01)),
    ("fp16", (0.002, 0.002, 0.002)),
    ("int8", (0.02, 0.025, 0.06)),
    ("fp8", (0.05, 0.05, 0.07)),
]


@pytest.mark.parametrize(("moments", "bounds"), BOUNDS)
def test_the_error_of_500_steps_against_fp32_moments_is_bounded(moments: str, bounds: tuple[float, ...]):
    for sigma, bound in zip((0.5, 1.0, 2.0), bounds, strict=True):
        drift = drift_after_500_steps(moments, sigma)
        print(f"{moments} sigma {sigma}: {drift:.4f}")
        assert drift < bound, (sigma, drift)


@pytest.mark.parametrize(("first", "second"), [("int8", "bf16"), ("bf16", "fp8"), ("fp32", "int8"), ("fp16", "fp32")])
def test_each_moment_has_a_type_of_its_own(first: str, second: str):
    optim = replace(OPTIM, moments=first, second_moment=second)  # pyright: ignore[reportArgumentType]
    exact_model, exact_buckets, exact = make_both("fp32")
    model, buckets, optimizer = make_both("fp32", optim=optim)
    for step in range(1, 6):
        put_gradients(buckets, step)
        put_gradients(exact_buckets, step)
        optimizer.step(step, 1e-2)
        exact.step(step, 1e-2)
    for (name, a), b in zip(model.named_parameters(), exact_model.parameters(), strict=True):
        assert (a - b).norm() < 0.02 * b.norm(), name
    sizes = {"int8": 1 + 4 / 128, "fp8": 1 + 4 / 128, "fp16": 2 + 4 / 128, "bf16": 2, "fp32": 4}
    elements = sum(len(bucket.weights) for bucket in buckets)
    assert optimizer.bytes()["mean"] == sizes[first] * elements
    assert optimizer.bytes()["mean_square"] == sizes[second] * elements


def test_bf16_weights_with_8_bit_moments_take_at_most_407_hundredths_of_a_byte():
    _, buckets, optimizer = make_both("bf16", optim=replace(OPTIM, main="none", moments="int8"))
    elements = sum(len(bucket.weights) for bucket in buckets)
    weights = sum(bucket.storage.weight_bytes() for bucket in buckets)
    assert (weights + sum(optimizer.bytes().values())) / elements <= 4.07
    assert not any(name.endswith(".main") for name in named(optimizer))


def test_weights_without_main_weights_move_in_the_mean_by_what_bf16_cannot_hold():
    """Each step is 1e-4, where bf16 has steps of 1/256 below one."""
    model, buckets, optimizer = make_both("bf16", optim=replace(OPTIM, main="none", weight_decay=0.0))
    for step in range(1, 101):
        for bucket in buckets:
            bucket.gradients.fill_(1.0)
        optimizer.step(step, 1e-4)
    weights = torch.cat([p.flatten() for n, p in model.named_parameters() if n.endswith("norm.weight")]).float()
    steps_of_bf16 = 1 / 256
    tolerance = 5 * steps_of_bf16 / math.sqrt(len(weights))
    assert weights.mean().item() == pytest.approx(1 - 100 * 1e-4, abs=tolerance)
    assert weights.unique().numel() > 1


def test_stochastic_rounding_of_weights_does_not_depend_on_the_shares():
    g, m, v = (torch.randn(4 * STATE_BLOCK, generator=torch.Generator().manual_seed(i)) for i in range(3))
    scalars = torch.tensor(adamw_scalars(3, 1e-3, OPTIONS, seed=11), dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    weights = torch.ones(len(g), dtype=torch.bfloat16)
    parts = weights.clone()
    adamw(weights, g, m.clone(), v.square(), None, one, scalars, OPTIONS, 1280)
    for begin in (0, 2 * STATE_BLOCK):
        window = slice(begin, begin + 2 * STATE_BLOCK)
        adamw(parts[window], g[window], m[window], v[window].square(), None, one, scalars, OPTIONS, 1280 + begin)
    assert torch.equal(weights, parts)
    assert not torch.equal(weights, torch.ones_like(weights))


@pytest.mark.parametrize("scale", [math.nan, math.inf])
@pytest.mark.parametrize("moments", BLOCK_TYPES)
def test_a_scale_that_is_no_number_leaves_everything_as_it_is(scale: float, moments: str):
    optim = replace(OPTIM, main="none", moments=moments)  # pyright: ignore[reportArgumentType]
    model, buckets, optimizer = make_both("bf16", optim=optim)
    put_gradients(buckets, 1)
    optimizer.step(1, 1e-2)
    before = {n: copied(t) for n, t in [*named(optimizer).items(), *model.named_parameters()]}
    optimizer.step(2, 1e-2, {"": torch.tensor(scale)})
    for name, value in [*named(optimizer).items(), *model.named_parameters()]:
        assert torch.equal(copied(value), before[name]), name


def test_muon_without_main_weights_rounds_stochastically():
    """Roundings of a step are off by half a unit in the last place on average at most, and add up as a random walk."""
    steps = 30
    optim = replace(OPTIM, rule="muon", main="none", moments="bf16", weight_decay=0.0)
    exact_model, exact_buckets, exact = make_both("bf16", optim=replace(optim, main="fp32"))
    model, buckets, optimizer = make_both("bf16", optim=optim)
    for step in range(1, steps + 1):
        put_gradients(buckets, step)
        put_gradients(exact_buckets, step)
        optimizer.step(step, 1e-4)
        exact.step(step, 1e-4)
    main = {name.removesuffix(".main"): x for name, x in named(exact).items() if name.endswith(".main")}
    moved = {name: x for name, x in main.items() if ".experts." in name}
    weights = dict(model.named_parameters())
    for name, expected in moved.items():
        error = weights[name].detach().flatten().float() - expected
        last_place = 2**-7 * expected.abs()
        assert error.abs().mean() < steps**0.5 / 2 * last_place.mean(), name
        assert error.mean().abs() < 4 * error.std() / len(error) ** 0.5, f"{name}: biased"
    assert optimizer.bytes()["main"] == 0
    del exact_model
