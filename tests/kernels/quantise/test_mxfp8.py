"""MXFP8 against the rules, stated here once more in exact arithmetic on single numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from moefold.kernels.quantise.mxfp8 import (
    MX_BLOCK,
    ScaleRounding,
    dequantise_mxfp8,
    power_of_two,
    quantise_mxfp8,
    quantise_mxfp8_squares,
)

E4M3_NUMBERS = sorted(
    {Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)}
    | {(1 + Fraction(m, 8)) * Fraction(2) ** e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)}
)


def fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def plain_scale(amax: float, rounding: ScaleRounding) -> int:
    """The scale's byte."""
    if not math.isfinite(amax):
        return 255
    if rounding == "down":
        exponent = math.frexp(amax)[1] - 1 - 8 if amax else -127
        return max(exponent, -127) + 127
    target = Fraction(fp32(amax * fp32(1 / 448)))
    byte = 0
    while Fraction(2) ** (byte - 127) < target:
        byte += 1
    return byte


def plain_value(x: float, byte: int) -> Fraction:
    """The E4M3 number nearest to x / 2^e, of two the one with the even mantissa."""
    scaled = abs(Fraction(x)) / Fraction(2) ** (byte - 127)
    order = sorted(range(len(E4M3_NUMBERS)), key=lambda i: (abs(E4M3_NUMBERS[i] - scaled), i % 2))
    nearest = E4M3_NUMBERS[order[0]]
    return -nearest if x < 0 else nearest


AMAXES = {
    "a power of two": 1.0,
    "448": 448.0,
    "just above 448": math.nextafter(448.0, 500.0),
    "449": 449.0,
    "1.75 times a power of two": 1.75 * 2.0**-20,
    "largest": 3.3e38,
    "smallest normal": 2.0**-126,
    "subnormal": 2.0**-140,
    "448 times 2^-127": 448 * 2.0**-127,
    "above 448 times 2^-127": 450 * 2.0**-127,
    "zero": 0.0,
}


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("name", AMAXES)
def test_bytes_and_scales_follow_the_rules(name: str, rounding: ScaleRounding):
    amax = fp32(AMAXES[name])
    parts = [0.0, -0.0, 1.0, 0.5, 0.53, 0.9375, 0.96875, 0.01, 2.0**-9, 2.0**-10, 3 * 2.0**-11, -0.3, -1 / 3, 1e-5]
    block = torch.zeros(MX_BLOCK)
    block[: len(parts)] = torch.tensor(parts) * amax
    values, scales = quantise_mxfp8(block, rounding)
    byte = plain_scale(float(block.abs().max()), rounding)
    assert int(scales) == byte
    for x, q in zip(block.tolist(), values.float().tolist(), strict=True):
        assert Fraction(q) == plain_value(x, byte), (x, q)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rounding", ["up", "down"])
def test_a_block_with_a_value_that_is_not_finite_is_nan_and_others_are_not(bad: float, rounding: ScaleRounding):
    x = torch.ones(2, 2 * MX_BLOCK)
    x[1, 40] = bad
    quantised = quantise_mxfp8(x, rounding)
    assert quantised.scales[1, 1] == 255
    found = dequantise_mxfp8(quantised)
    assert found[1, MX_BLOCK:].isnan().all()
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[1, :MX_BLOCK], x[1, :MX_BLOCK])


def test_every_scale_is_its_power_of_two():
    found = power_of_two(torch.arange(256, dtype=torch.uint8))
    assert found[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert found[255].isnan()


def test_rounded_up_scales_saturate_nothing():
    x = torch.randn(64, 256) * torch.randn(64, 256).exp()
    quantised = quantise_mxfp8(x)
    error = (dequantise_mxfp8(quantised) - x).abs()
    step = power_of_two(quantised.scales).repeat_interleave(MX_BLOCK, 1) * 2.0**-9
    assert (error <= torch.maximum(x.abs() * 2.0**-4, step / 2)).all()


def test_the_transposed_matrix_has_the_transposed_squares():
    w = torch.randn(3, 64, 96)
    values, scales = quantise_mxfp8_squares(w)
    transposed = quantise_mxfp8_squares(w.mT.contiguous())
    assert torch.equal(values.mT.float(), transposed.values.float())
    assert torch.equal(scales.mT, transposed.scales)
    exact = dequantise_mxfp8(quantise_mxfp8_squares(w))
    assert torch.equal(exact.mT, dequantise_mxfp8(transposed))
    assert (exact - w).abs().max() < 0.07 * w.abs().max()


def test_dequantised_numbers_are_exact_in_bf16():
    x = torch.randn(32, 64) * 100
    found = dequantise_mxfp8(quantise_mxfp8(x))
    assert torch.equal(found, found.bfloat16().float())
