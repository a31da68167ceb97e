"""NF4 with scales in bytes, against a plain statement; what it stands for is quantised to itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moefold.config.base_formats import BASE_FORMATS
from moefold.kernels.quantise.nf4 import quantise_nf4
from moefold.kernels.quantise.nf4_double import dequantise_nf4_double, quantise_nf4_double
from tests.kernels.quantise.test_nf4 import TABLE

BLOCKS = 40  # a group of 32 and a short one


def rows(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(30, BLOCKS, 64, generator=generator) * torch.rand(30, BLOCKS, 1, generator=generator)
    x[1, :32] = 0
    x[2, 5] = 0
    return x.flatten(1).to(dtype)


def test_scales_are_numbers_of_a_byte_times_the_largest_of_32_blocks():
    x = rows(torch.float32)
    values, scales = quantise_nf4_double(x)
    format = BASE_FORMATS["nf4_double"]
    assert torch.equal(values, quantise_nf4(x).values)
    assert values[0].nbytes + scales[0].nbytes == format.row_bytes(x.shape[1], wide=2)
    stands_for = dequantise_nf4_double(quantise_nf4_double(x)).numpy().reshape(30, BLOCKS, 64)
    magnitudes = np.abs(x.numpy().reshape(30, BLOCKS, 64)).max(-1)
    codes = values.numpy().reshape(30, BLOCKS, 32)
    numbers = np.stack((codes >> 4, codes & 15), -1).reshape(30, BLOCKS, 64)
    for row in range(30):
        for first, behind in ((0, 32), (32, BLOCKS)):
            top = float(magnitudes[row, first:behind].max())
            for block in range(first, behind):
                number = round(float(magnitudes[row, block]) / top * 255) if top else 0
                assert int(scales[row, block]) == number
                expected = TABLE[numbers[row, block]] * np.float32(top * number / 255)
                np.testing.assert_allclose(stands_for[row, block], expected, rtol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_blocks_stand_for_is_quantised_to_the_same(dtype: torch.dtype):
    values = dequantise_nf4_double(quantise_nf4_double(rows(dtype))).to(dtype)
    again = dequantise_nf4_double(quantise_nf4_double(values)).to(dtype)
    assert torch.equal(again, values)


def test_a_value_that_is_not_finite_shows():
    x = rows(torch.float32)
    x[0, 3] = torch.nan
    assert not dequantise_nf4_double(quantise_nf4_double(x))[0, :64].isfinite().all()
