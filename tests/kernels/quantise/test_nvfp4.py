"""NVFP4 against the rules, stated here once more on single numbers."""

from __future__ import annotations

import math

import pytest
import torch

from moefold.kernels.quantise.nvfp4 import (
    NV_BLOCK,
    dequantise_nvfp4,
    pack_e2m1,
    quantise_nvfp4,
    quantise_nvfp4_squares,
    round_to_e2m1,
    unpack_e2m1,
    unscaled_nvfp4,
)
from moefold.layout.counter_random import random_counters
from tests.support.fp8_numbers import nearest_byte, rounded_to_fp32, value_of_byte

NEAREST = {  # ties go to the even code
    0.0: 0.0, 0.25: 0.0, 0.2501: 0.5, 0.5: 0.5, 0.7499: 0.5, 0.75: 1.0, 1.25: 1.0, 1.2501: 1.5, 1.5: 1.5, 1.75: 2.0,
    2.0: 2.0, 2.5: 2.0, 2.5001: 3.0, 3.0: 3.0, 3.5: 4.0, 3.4999: 3.0, 4.0: 4.0, 5.0: 4.0, 5.0001: 6.0, 6.0: 6.0,
    7.0: 6.0, 1e30: 6.0, math.inf: 6.0, 1e-30: 0.0,
}  # fmt: skip
LARGEST = float(torch.finfo(torch.float32).max)
CODES = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_to_nearest(sign: float):
    x = sign * torch.tensor(list(NEAREST))
    expected = [CODES[value] + (8 if sign < 0 else 0) for value in NEAREST.values()]
    assert round_to_e2m1(x).tolist() == expected


def test_every_code_survives_packing_and_the_first_of_a_pair_is_the_low_half():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = pack_e2m1(codes)
    assert packed[:2].tolist() == [0x10, 0x32]
    assert packed.shape == (16,)
    magnitudes = list(CODES)
    assert unpack_e2m1(packed)[:16].tolist() == [*magnitudes, *(-m for m in magnitudes)]
    assert math.copysign(1, float(unpack_e2m1(packed)[8])) == -1, "a negative zero keeps its sign"


def plain_block(block: list[float], amax: float) -> tuple[float, list[float]]:
    """The scale and the values of one block, operation by operation."""
    fp32 = rounded_to_fp32
    encode = 1.0 if amax == 0 else min(fp32(2688.0 / amax), LARGEST)
    encode = encode or 1.0
    block_amax = max(abs(x) for x in block)
    scale = value_of_byte(nearest_byte(fp32(block_amax * fp32(encode * fp32(1 / 6))), "e4m3"), "e4m3")
    decoded = fp32(scale * fp32(1 / encode))
    factor = min(fp32(1 / decoded), LARGEST) if decoded else LARGEST
    values = [unpacked(fp32(x * factor)) for x in block]
    return scale, values


def unpacked(x: float) -> float:
    magnitudes = list(CODES)
    size = min(abs(x), 6.0)
    nearest = min(magnitudes, key=lambda m: (abs(m - size), CODES[m] % 2))
    return math.copysign(nearest, x)


SCALES_OF_BLOCKS = [1.0, 1e-3, 6.0, 2688.0, 1e-7, 0.0, 3.7, 1e-12]


@pytest.mark.parametrize("overall", [1.0, 1e-30, 1e30, 0.02, 3e38, 1e-41])
def test_blocks_follow_the_rules(overall: float):
    torch.manual_seed(0)
    x = torch.randn(len(SCALES_OF_BLOCKS), NV_BLOCK).clamp(-3, 3) / 3
    x *= torch.tensor(SCALES_OF_BLOCKS)[:, None] / 2688
    x *= overall
    amax = x.abs().max().view(1, 1)
    found = quantise_nvfp4(x, amax)
    values = unpack_e2m1(found.packed)
    for row in range(len(x)):
        scale, expected = plain_block(x[row].tolist(), float(amax))
        assert float(found.scales[row]) == scale
        assert values[row].tolist() == expected


def test_a_block_of_zeros_and_a_block_too_small_for_its_scale_are_zero():
    x = torch.zeros(3, NV_BLOCK)
    x[0] = 1.0
    x[2] = 1e-9
    found = quantise_nvfp4(x, torch.ones(1, 1))
    assert found.scales.float().flatten().tolist() == [448.0, 0.0, 0.0]
    assert torch.equal(dequantise_nvfp4(found)[1:], torch.zeros(2, NV_BLOCK))
    assert torch.equal(dequantise_nvfp4(found)[0], x[0])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_infinity_follows_the_chain_to_2688_and_its_block_is_zero_otherwise(sign: float):
    """Of an infinite amax the encoding scale is zero, so it is 1: the block's scale is 448 and its code 6."""
    x = torch.ones(2, 2 * NV_BLOCK)
    x[0, 3] = sign * math.inf
    found = quantise_nvfp4(x, x.abs().max().view(1, 1))
    for row in range(2):
        for block in range(2):
            part = x[row, block * NV_BLOCK :][:NV_BLOCK].tolist()
            scale, values = plain_block(part, math.inf)
            assert float(found.scales[row, block]) == scale
            assert unpack_e2m1(found.packed)[row, block * NV_BLOCK :][:NV_BLOCK].tolist() == values
    back = dequantise_nvfp4(found)
    assert back[0, 3] == sign * 2688


def test_nan_is_not_lost():
    x = torch.ones(2, NV_BLOCK)
    x[1, 3] = math.nan
    amax = x.abs().amax().view(1, 1)
    assert dequantise_nvfp4(quantise_nvfp4(x, amax)).isnan().any()


def test_both_layouts_of_squares_dequantise_to_the_same_numbers():
    w = torch.randn(2, 48, 32)
    plain = dequantise_nvfp4(quantise_nvfp4_squares(w))
    transposed = dequantise_nvfp4(quantise_nvfp4_squares(w.mT.contiguous()))
    assert torch.equal(plain.mT, transposed)
    one = dequantise_nvfp4(quantise_nvfp4_squares(w[1]))
    assert torch.equal(one, plain[1]), "matrices have scales of their own"


def test_values_times_block_scales_are_exact_in_bf16():
    x = torch.randn(64, 64) * torch.randn(64, 64).exp()
    found = unscaled_nvfp4(quantise_nvfp4(x, x.abs().max().view(1, 1)))
    assert torch.equal(found, found.bfloat16().float())


def test_memory_is_four_and_a_half_bits_a_value():
    found = quantise_nvfp4(torch.randn(32, 64), torch.ones(1, 1))
    assert found.packed.nbytes + found.scales.nbytes == 32 * 64 * 4.5 / 8


def test_stochastic_rounding_is_unbiased_and_repeats():
    x = torch.linspace(-6, 6, 241).repeat(4096, 1)
    random = random_counters(torch.arange(4096), 1, torch.arange(241)).numbers_of_16_bits()
    table = torch.tensor([*CODES, *(-m for m in CODES)])
    found = table[round_to_e2m1(x, random).long()]
    grid = torch.tensor(list(CODES))
    above = torch.searchsorted(grid, x[0].abs().contiguous()).clamp(1, 7)
    step = grid[above] - grid[above - 1]
    error = found.mean(0) - x[0]
    assert (error.abs() <= 5 * step * 0.5 / 4096**0.5).all()
    assert ((found - x).abs() < step).all(), "to one of the two neighbours"
    assert torch.equal(round_to_e2m1(x, random), round_to_e2m1(x, random))
    exact = torch.tensor([list(CODES)])
    largest = torch.full((1, 8), 2**16 - 1)
    assert torch.equal(round_to_e2m1(exact, 0 * largest), round_to_e2m1(exact, largest)), "E2M1 numbers stay"


def test_the_chance_of_rounding_up_is_right_to_two_to_minus_17():
    every = torch.arange(2**16)[:, None]
    x = torch.rand(1, 60) * 6.1
    x[0, :4] = torch.tensor([1e-6, 0.4999999, 3.9999998, 5.99])
    shares = (round_to_e2m1(x.expand(2**16, -1), every).long() & 7).double().mean(0)
    grid = torch.tensor(list(CODES), dtype=torch.float64)
    size = x[0].double().clamp(max=6)
    below = (torch.searchsorted(grid, size, right=True) - 1).clamp(max=6)
    exact = below + (size - grid[below]) / (grid[below + 1] - grid[below])
    assert (shares - exact).abs().max() <= 2**-17 + 2**-23
