"""What a reader meets who follows a token through one MoE layer."""

from __future__ import annotations

import subprocess
import sys

MOST_FILES = 20


def test_one_layers_forward_enters_few_files():
    command = [sys.executable, "-m", "tests.support.token_way", "-v"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    files = int(done.stdout.split()[0])
    assert files <= MOST_FILES, done.stdout
