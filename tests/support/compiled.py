"""Kernels compiled for Hopper in a process of their own: tests run under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def output_of_compiler(module: str) -> str:
    """What `python -m tests.support.<module>` prints, which must succeed."""
    pytest.importorskip("triton")
    outside_interpreter = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.support.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, env=outside_interpreter)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
