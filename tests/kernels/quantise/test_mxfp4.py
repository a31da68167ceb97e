"""MXFP4 against OCP's rules, stated here once more in exact arithmetic on single numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from moefold.checkpoint.hf.dequantise import decode_mxfp4
from moefold.kernels.quantise.fp8 import Quantised
from moefold.kernels.quantise.mxfp4 import dequantise_mxfp4, quantise_mxfp4

MAGNITUDES = [Fraction(number) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]  # of E2M1, by code


def plain_byte(largest: float) -> int:
    """E8M0: the exponent of the largest magnitude, less 2."""
    exponent = math.frexp(largest)[1] - 1 - 2 if largest else -127
    return max(exponent, -127) + 127


def plain_code(x: float, byte: int) -> int:
    """The code of the nearest magnitude, of two the even one; the highest bit is the sign."""
    scaled = abs(Fraction(x)) / Fraction(2) ** (byte - 127)
    code = min(range(8), key=lambda i: (abs(MAGNITUDES[i] - scaled), i % 2))
    return code + 8 * (math.copysign(1, x) < 0)


LARGEST = {"one": 1.0, "six": 6.0, "just below 8": math.nextafter(8.0, 0), "tiny": 2.0**-120, "huge": 2.0**120}


@pytest.mark.parametrize("largest", LARGEST.values(), ids=LARGEST.keys())
def test_bytes_scales_and_values_are_those_of_the_rules(largest: float):
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(2, 64, generator=generator) * 2 - 1
    x[:, 1:8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) / 8  # ties, where the largest is 6 or less
    x[:, 9:16] = -x[:, 1:8]
    x[:, ::32] = 1.0
    x *= largest
    packed, scales = quantise_mxfp4(x)
    values = dequantise_mxfp4(Quantised(packed, scales))
    for i, block in enumerate(x.view(-1, 32).tolist()):
        byte = plain_byte(max(map(abs, block)))
        codes = [plain_code(value, byte) for value in block]
        expected = [first + 16 * second for first, second in zip(codes[::2], codes[1::2], strict=True)]
        assert int(scales.flatten()[i]) == byte
        assert packed.view(-1, 16)[i].tolist() == expected
        signed = [MAGNITUDES[code % 8] * (1 - code // 8 * 2) for code in codes]
        exact = [number * Fraction(2) ** (byte - 127) for number in signed]
        assert [Fraction(value) for value in values.view(-1, 32)[i].tolist()] == exact


def test_blocks_of_any_file_are_kept_exactly():
    """Whatever scale a file chose: codes of a block may all be small."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (6, 4, 16), generator=generator, dtype=torch.uint8)
    codes[1] &= 0x11
    codes[2] &= 0x33
    codes[3] &= 0xBB
    codes[4] = 0
    scales = torch.randint(100, 140, (6, 4), generator=generator, dtype=torch.uint8)
    x = decode_mxfp4(codes, scales)
    assert torch.equal(dequantise_mxfp4(quantise_mxfp4(x)), x)
    assert torch.equal(dequantise_mxfp4(quantise_mxfp4(x.bfloat16())), x)


def test_a_value_that_is_not_finite_shows():
    x = torch.ones(1, 64)
    x[0, 3] = torch.inf
    values = dequantise_mxfp4(quantise_mxfp4(x))
    assert bool(values[0, :32].isnan().all())
    assert bool((values[0, 32:] == 1).all())
