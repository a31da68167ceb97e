"""Kernels of quantisation compile for Hopper with the Triton that is installed, and round as the reference does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

LINE = re.compile(
    r"(.+): (\d+) casts, (\d+) stored and split, (\d+) stores of 16 bytes, (\d+) operations without IEEE rounding"
)


def test_every_kernel_compiles_with_the_cast_of_the_gpu_whole_stores_and_ieee_rounding():
    pytest.importorskip("triton")
    outside_interpreter = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_quantise"]
    done = subprocess.run(command, capture_output=True, text=True, env=outside_interpreter)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 23
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line
        name, casts, torn, stores, rough = found.groups()
        division = 2 if name.startswith("weight blocks, Gluon") else 0  # its correction (fp8_hopper.py)
        assert int(rough) == division, line
        assert int(torn) == 0, line  # tests/support/compile_quantise.py says what becomes of these
        if name.startswith(("quantise", "weight")) and "maxima" not in name:
            assert int(casts) >= 16, line
            assert int(stores) >= 2, line
