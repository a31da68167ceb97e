"""Pictures of both pages for a person to look at: `python -m tests.support.page_shots FOLDER [RUN]`.

The planner's page and the watch's page of a run, by default a made one, at the widths of a screen and of a phone, light
and dark: eight PNG files.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.support.browser import BROWSER
from tests.support.planner_page import served
from tests.support.run_folders import run_folder

WIDTHS = {1280: 900, 390: 844}  # and heights, in pixels
SCHEMES = ("light", "dark")
SETTLED = 2000  # milliseconds behind the last answer, until plots are drawn
PATIENCE = 120_000
CONTENT = {"planner": ".verdict.good, .verdict.bad", "watch": "canvas"}  # of a page that has its first answer


def take_pictures(browser: Browser, place: str, name: str, folder: Path) -> None:
    schemes: tuple[Any, ...] = SCHEMES
    for (width, height), scheme in product(WIDTHS.items(), schemes):
        size: Any = {"width": width, "height": height}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.set_default_timeout(PATIENCE)
        page.goto(f"http://{place}/")
        page.wait_for_selector(CONTENT[name])
        page.wait_for_timeout(SETTLED)
        picture = folder / f"{name}-{width}-{scheme}.png"
        page.screenshot(path=picture, full_page=True)
        print(picture)
        page.close()


def main(folder: str, run: str = "") -> None:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        watched = run or str(run_folder(Path(scratch) / "run", steps=10))
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for name, words in {"planner": ["web"], "watch": ["watch", watched]}.items():
            with served(*words) as place:
                take_pictures(browser, place, name, target)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
