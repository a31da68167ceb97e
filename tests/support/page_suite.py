"""Every test that needs a browser: `python -m tests.support.page_suite`. Exit code 2: no browser here."""

from __future__ import annotations

import subprocess
import sys

from tests.support.browser import BROWSER, MISSING
from tests.support.marked_suite import conclude, read_suite_options, run_part, tell_missing


def main() -> int:
    options = read_suite_options(__doc__, "page-suite.md")
    if not BROWSER:
        return tell_missing(MISSING)
    version = subprocess.run([BROWSER, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [run_part("in a browser", "-m", "page", "tests/web")]
    return conclude("Tests in a browser", "tests.support.page_suite", version.strip(), options, parts)


if __name__ == "__main__":
    sys.exit(main())
