"""Conversions of Triton's interpreter by torch, where its own are wrong.

Triton 3.7's interpreter rounds ties to FP8 away from zero, drops the carry into the exponent (31.5 becomes 16) and cuts
off subnormal results; it cuts off the digits that bf16 lacks, and misreads subnormal bf16. GPUs round to nearest, ties
to even, as torch does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
MENDED = (tl.float8e4nv, tl.float8e5, tl.bfloat16)
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}

convert_as_shipped = interpreter._convert_float


def convert_by_torch(values: np.ndarray, from_dtype: Any, to_dtype: Any, rounding: Any) -> np.ndarray:
    """Bits of the converted values, as the interpreter's function returns them."""
    reads_bf16 = (from_dtype, to_dtype) == (tl.bfloat16, tl.float32)
    if not reads_bf16 and not (from_dtype == tl.float32 and to_dtype in MENDED):
        return convert_as_shipped(values, from_dtype, to_dtype, rounding)
    raw = torch.frombuffer(bytearray(values.tobytes()), dtype=TORCH[from_dtype])
    converted = raw.to(TORCH[to_dtype])
    bits = converted.view(torch.uint8).numpy().view(BITS[converted.element_size()])
    return bits.reshape(values.shape)
