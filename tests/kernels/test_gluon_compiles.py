"""Gluon kernels compile for Hopper with the Triton that is installed, and their products are on tensor cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_every_gluon_kernel_compiles_to_products_on_tensor_cores():
    pytest.importorskip("triton")
    outside_interpreter = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_gluon"]
    done = subprocess.run(command, capture_output=True, text=True, env=outside_interpreter)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 14
    for line in lines:
        products = int(line.rsplit(": ")[1].split()[0])
        assert products >= 8, line
