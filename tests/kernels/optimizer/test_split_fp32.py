"""fp32 numbers as two halves: nothing is lost, and the upper one is the nearest bf16."""

from __future__ import annotations

import torch

from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest, upper_bfloat16


def numbers() -> torch.Tensor:
    """Random ones of all sizes, those half way between two bf16, zeros, the smallest and the largest."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    ties = (bits & -65536) | 0x8000
    edges = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.38e38, -3.38e38])
    found = torch.cat((bits.view(torch.float32), ties.view(torch.float32), edges))
    return found[found.abs() < 3.39e38]  # beyond, the nearest bf16 is infinite


def test_the_halves_are_the_number_to_the_bit():
    x = numbers()
    assert torch.equal(joined_fp32(upper_bfloat16(x), lower_16_bits(x)).view(torch.int32), x.view(torch.int32))


def test_the_upper_half_is_the_nearest_bf16_and_the_one_further_from_zero_of_two():
    x = numbers()
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert tie.any()
    assert torch.equal(round_to_nearest(x, torch.bfloat16)[~tie], x[~tie].to(torch.bfloat16))
    assert (round_to_nearest(x, torch.bfloat16)[tie].double().abs() > x[tie].double().abs()).all()


def test_a_bf16_number_lacks_nothing():
    x = torch.randn(1000).to(torch.bfloat16)
    assert (lower_16_bits(x.float()) == 0).all()
    assert torch.equal(joined_fp32(x, torch.zeros(1000, dtype=torch.int16)), x.float())
