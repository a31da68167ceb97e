"""The browser of the page's tests: a Chromium of the system, which pip cannot install."""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from tests.support.machine_speed import slowness

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no Chromium here (Debian: apt install chromium)"
without_browser = pytest.mark.skipif(not BROWSER, reason=MISSING)


@cache
def longest_wait() -> float:
    """Milliseconds for a page to answer in, also on a busy machine."""
    return 60_000 * slowness()
