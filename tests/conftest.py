"""Set before any test imports Triton: where there is no GPU, its kernels run in its interpreter. Where tests run
side by side, each has one thread: torch's threads would wait for each other."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
