"""Blocks of a frozen base (QLoRA): how each format of config/base_formats.py quantises rows, and what blocks stand for.

Dequantised, blocks are rows of a product's operand: an op, in one read and one write on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moefold.config.base_formats import BASE_FORMATS
from moefold.kernels.quantise.fp8 import BLOCK, E4M3, Quantised
from moefold.kernels.quantise.mxfp4 import dequantise_mxfp4, quantise_mxfp4
from moefold.kernels.quantise.mxfp8 import dequantise_mxfp8, quantise_mxfp8
from moefold.kernels.quantise.nf4 import dequantise_nf4, quantise_nf4
from moefold.kernels.quantise.nf4_double import dequantise_nf4_double, quantise_nf4_double
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


class BlockCodec(NamedTuple):
    """Values along the last dim to blocks, and back in fp32."""

    quantise: Callable[[Tensor], Quantised]
    dequantise: Callable[[Quantised], Tensor]
    dtype: torch.dtype = torch.uint8  # of the values as stored


CODECS = {
    "fp8": BlockCodec(partial(quantise_mxfp8, block=BLOCK), partial(dequantise_mxfp8, block=BLOCK), E4M3.dtype),
    "nf4": BlockCodec(quantise_nf4, dequantise_nf4),
    "nf4_double": BlockCodec(quantise_nf4_double, dequantise_nf4_double),
    "mxfp4": BlockCodec(quantise_mxfp4, dequantise_mxfp4),
}


def quantise_rows(x: Tensor, format: str) -> Quantised:
    """Rows of any width: the last block of a row is filled up with zeros."""
    width = x.shape[-1]
    missing = -width % BASE_FORMATS[format].block
    padded = pad(x, (0, missing))
    return CODECS[format].quantise(padded)


@register_inner_op
def dequantise_rows(values: Tensor, scales: Tensor, format: str, width: int, dtype: torch.dtype) -> Tensor:
    """What blocks of rows stand for: (..., width) in this dtype."""
    dequantise = CODECS[format].dequantise
    wide = dequantise(Quantised(values, scales))
    return wide[..., :width].to(dtype)


@dequantise_rows.register_fast("triton")
def dequantise_rows_triton(values: Tensor, scales: Tensor, format: str, width: int, dtype: torch.dtype) -> Tensor:
    from moefold.kernels.quantise.base_codecs_triton import launch_dequantise_rows

    return launch_dequantise_rows(values, scales, format, width, dtype)


CASE_SHAPES = {
    "rows": (5, 136),
    "experts": (3, 4, 256),
    "a long row": (1, 4160),
    "no rows": (0, 64),
}


@dequantise_rows.register_cases
def dequantise_rows_cases(draw: CaseInputs) -> Cases:
    for format in BASE_FORMATS:
        for name, shape in CASE_SHAPES.items():
            width = shape[-1]
            values, scales = quantise_rows(draw.normal(*shape), format)
            inputs = (values, scales, format, width, draw.wide_dtype)
            yield KernelCase(f"{format}, {name}", inputs)
    values, scales = quantise_rows(draw.normal(5, 136), "nf4")
    yield KernelCase("nf4, scales in bf16", (values, scales.bfloat16(), "nf4", 136, torch.bfloat16))
