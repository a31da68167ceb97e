"""The browser of the page's tests: a Chromium of the system, which pip cannot install."""

from __future__ import annotations

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no Chromium here (Debian: apt install chromium)"
without_browser = pytest.mark.skipif(not BROWSER, reason=MISSING)
