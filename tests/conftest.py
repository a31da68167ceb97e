"""Set before any test imports Triton: where there is no GPU, its kernels run in its interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
