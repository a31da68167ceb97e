"""A supervised run under one fault after another, the short form of `python -m tests.support.soak`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.soak import FAULTS, link_hindrance

LEAST_GOODPUT = 0.15  # of faults every six seconds, beside other work on the machine


@pytest.mark.alone
@pytest.mark.extended
def test_each_fault_of_a_soak_is_survived_with_the_losses_of_the_undisturbed_run():
    command = [sys.executable, "-m", "tests.support.soak", "--minutes", "0.5", "--every", "6", "--seed", "5"]
    command += ["--step-timeout", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    struck = re.findall(r"^(\w+): \d+ times", done.stdout, re.M)
    expected = set(FAULTS) - ({"cut"} if link_hindrance() else set())
    assert set(struck) == expected
    (goodput,) = re.findall(r"^goodput (\S+);", done.stdout, re.M)
    assert float(goodput) > LEAST_GOODPUT, done.stdout
