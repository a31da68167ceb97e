"""Every test that needs a GPU: `python -m tests.support.gpu_suite`. Exit code 2: no CUDA device here.

Tests that time steps or look at streams come last, one after the other, with the whole card for themselves.
"""

from __future__ import annotations

import os
import sys

import torch

from tests.support.marked_suite import conclude, read_suite_options, run_part, tell_missing

BYTES_PER_PROCESS = 20 << 30  # the largest of these tests trains a layer of Mixtral-8x7B
MOST_PROCESSES = 6
MEASURED = (
    "tests/plan/test_on_gpu.py",
    "tests/pipeline/test_overlap_on_gpu.py",
    "tests/bench/test_tile_overlap.py",
    "tests/bench/test_projection_overlap.py",
)
NO_PAGES = "--ignore=tests/web"  # no test of a page needs a GPU, and GPU machines often lack what pages need


def main() -> int:
    options = read_suite_options(__doc__, "gpu-suite.md")
    if not torch.cuda.is_available():
        return tell_missing("no CUDA device here (torch.cuda.is_available() is false)")
    processes = side_by_side()
    beside = ("-n", str(processes), "--dist", "worksteal")
    ignored = [f"--ignore={path}" for path in MEASURED]
    parts = [
        run_part(f"{processes} side by side", NO_PAGES, *ignored, "-m", "gpu", *beside),
        run_part("timed, alone", *MEASURED, "-m", "gpu"),
    ]
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return conclude("Tests on a GPU", "tests.support.gpu_suite", device, options, parts)


def side_by_side() -> int:
    """How many processes fit the card's free memory and the machine's cores."""
    free, _ = torch.cuda.mem_get_info()
    fitting = min(free // BYTES_PER_PROCESS, os.cpu_count() or 1, MOST_PROCESSES)
    return max(1, fitting)


if __name__ == "__main__":
    sys.exit(main())
