"""Torch dtypes by the names that configurations use."""

from __future__ import annotations

import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
