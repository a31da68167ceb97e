"""Set before any test imports Triton: where there is no GPU, its kernels run in its interpreter. Where tests run
side by side, each has one thread: torch's threads would wait for each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

ALONE = ("cli", "train", "web")  # they start whole runs and servers, which would take ports and time from each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.relative_to(Path(__file__).parent).parts[:1] in [(folder,) for folder in ALONE]:
            item.add_marker(pytest.mark.alone)
