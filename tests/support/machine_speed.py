"""How slow this machine is now: limits in seconds are those of a machine on which a known import takes a quarter of a
second, and are stretched where it takes longer."""

from __future__ import annotations

import subprocess
import sys
import time

IMPORTS = "import tyro, rich.table, yaml, numpy"
USUAL_SECONDS = 0.25


def slowness() -> float:
    """At least one: seconds of the import over the usual ones, the best of three."""
    seconds = [seconds_to_import() for _ in range(3)]
    return max(1.0, min(seconds) / USUAL_SECONDS)


def seconds_to_import() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - begun
