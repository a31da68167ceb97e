"""What products of micro formats multiply is exact in bf16, for every code and every scale: so a product in bf16 with
sums in fp32 is the product of the formats."""

from __future__ import annotations

import torch

from moefold.kernels.quantise.mx_blocks import dequantise_mx
from moefold.kernels.quantise.nv_blocks import dequantise_nv

EVERY_BYTE = torch.arange(256).to(torch.uint8)
NAN = 0x7F  # of E4M3, with either sign


def test_every_mxfp8_value_is_exact_in_bf16_from_a_scale_of_two_to_minus_124_on():
    values = EVERY_BYTE.view(torch.float8_e4m3fn).expand(252, 256).contiguous()
    exponents = torch.arange(3, 255)
    scales = exponents.to(torch.uint8)[:, None].expand(252, 8).contiguous()
    exact = values.double() * 2.0 ** (exponents.double() - 127)[:, None]
    in_range = exact.abs() <= torch.finfo(torch.bfloat16).max  # NaN and what no block has: beyond fp32
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantise_mx(values, scales, dtype).double()
        assert torch.equal(found[in_range], exact[in_range])
    too_small = torch.full((1, 8), 2, dtype=torch.uint8)
    assert dequantise_mx(values[:1], too_small, torch.bfloat16)[0, 1] == 0, "2^-134, beneath bf16's range"


def test_every_nvfp4_value_without_its_scale_of_the_matrix_is_exact_in_bf16():
    finite = EVERY_BYTE[(EVERY_BYTE & 0x7F) != NAN]
    scales = finite.view(torch.float8_e4m3fn)[:, None]
    codes = torch.arange(16)
    packed = (codes[::2] | codes[1::2] << 4).to(torch.uint8).expand(len(finite), 8).contiguous()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    exact = torch.cat((magnitudes, -magnitudes)) * scales.double()
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantise_nv(packed, scales, dtype).double(), exact)
