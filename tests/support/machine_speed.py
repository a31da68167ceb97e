"""How slow this machine is now: limits in seconds are those of a machine on which a known import takes a quarter of a
second, and are stretched where it takes longer. Other work comes and goes within seconds, so that what is measured and
the import take turns."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

IMPORTS = "import tyro, rich.table, yaml, numpy"
USUAL_SECONDS = 0.25


def slowness(imports: int = 3) -> float:
    """At least one: seconds of the import over the usual ones, the best of so many."""
    seconds = [seconds_to_import() for _ in range(imports)]
    return max(1.0, min(seconds) / USUAL_SECONDS)


def least_seconds(measure: Callable[[], float], limit: float, turns: int = 5) -> float:
    """The least of some measurements, each divided by how slow the machine was right before it; no more are made once
    one is below the limit."""
    least = float("inf")
    for _ in range(turns):
        slow = slowness(imports=1)
        least = min(least, measure() / slow)
        if least < limit:
            break
    return least


def seconds_to_import() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - begun
