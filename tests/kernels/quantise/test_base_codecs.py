"""The kernel that dequantises a frozen base gives the bits of the reference, for every format."""

from __future__ import annotations

import pytest
import torch

from moefold.config.base_formats import BASE_FORMATS
from moefold.kernels.quantise.base_codecs import dequantise_rows, dequantise_rows_triton, quantise_rows

FORMATS = list(BASE_FORMATS)


def check_bits(device: str, format: str, scale: torch.dtype | None, dtype: torch.dtype, *shape: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, generator=generator, dtype=torch.float32).to(device)
    values, scales = quantise_rows(x, format)
    if format == "nf4" and scale is not None:
        scales = scales.to(scale)
    inputs = (values, scales, format, shape[-1], dtype)
    assert torch.equal(dequantise_rows_triton(*inputs), dequantise_rows(*inputs)), f"{format} {shape} {dtype}"


@pytest.mark.parametrize("format", FORMATS)
def test_the_kernel_gives_the_bits_of_the_reference(format: str):
    for shape in ((3, 5, 136), (1, 4160)):  # blocks that are short, and more bytes than a tile has
        check_bits("cpu", format, None, torch.float32, *shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", FORMATS)
def test_the_kernel_gives_the_bits_of_the_reference_on_cuda(format: str):
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 5, 136), (1, 4160), (4, 1536, 2048), (4, 2048, 768)):
            check_bits("cuda", format, torch.bfloat16, dtype, *shape)
