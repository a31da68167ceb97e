"""NF4 against the published table: bytes, scales and values to the bit, for each value by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefold.kernels.quantise.nf4 import dequantise_nf4, quantise_nf4

# The table of the QLoRA paper (appendix E), as text.
PUBLISHED = """
-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
TABLE = np.array(PUBLISHED.split(), dtype=np.float32)


def plain_code(x: np.float32, largest: np.float32) -> int:
    """The code of the nearest number; of two that are equally near the lower one."""
    scaled = float(x * (np.float32(1) / largest)) if largest else 0.0
    distances = [abs(float(number) - scaled) for number in TABLE]
    return int(np.argmin(distances))


def blocks_of(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 192, generator=generator)
    x[1] *= 1e-30
    x[2, :64] = 0
    x[3, 64:128] = 3.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_scales_and_values_are_those_of_the_published_table(dtype: torch.dtype):
    x = blocks_of(dtype)
    packed, scales = quantise_nf4(x)
    values = dequantise_nf4(quantise_nf4(x))
    assert packed.shape == (5, 96)
    assert scales.shape == (5, 3)
    flat = x.float().numpy().reshape(-1, 64)
    for i, block in enumerate(flat):
        largest = np.abs(block).max()
        codes = [plain_code(value, largest) for value in block]
        expected = [16 * first + second for first, second in zip(codes[::2], codes[1::2], strict=True)]
        assert packed.view(-1, 32)[i].tolist() == expected
        assert float(scales.flatten()[i]) == largest
        assert np.array_equal(values.view(-1, 64)[i].numpy(), TABLE[codes] * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_blocks_stand_for_is_quantised_to_the_same(dtype: torch.dtype):
    x = blocks_of(torch.float32)
    x[1] = 0.01 * x[0]  # within the range of fp16
    values = dequantise_nf4(quantise_nf4(x.to(dtype))).to(dtype)
    again = dequantise_nf4(quantise_nf4(values)).to(dtype)
    assert torch.equal(again, values)


def test_a_value_that_is_not_finite_shows():
    x = blocks_of(torch.float32)
    x[0, 3] = torch.nan
    values = dequantise_nf4(quantise_nf4(x))
    assert bool(values[0, :64].isnan().all())
    assert bool(values[0, 64:].isfinite().all())
