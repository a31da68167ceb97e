"""The watch's page in a browser, while runs go on.

Needs a browser (tests/support/browser.py): where there is none these tests are skipped.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.browser import BROWSER, longest_wait, without_browser
from tests.support.planner_page import served
from tests.support.run_folders import run_folder

pytestmark = [pytest.mark.page, without_browser]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page; anything that breaks in it, or that its policy forbids, is a failure."""
    fresh = browser.new_page(viewport={"width": 1200, "height": 900})
    fresh.set_default_timeout(longest_wait())
    expect.set_options(timeout=longest_wait())
    complaints: list[str] = []
    fresh.on("pageerror", lambda error: complaints.append(str(error)))
    fresh.on("console", lambda message: complaints.append(message.text))
    yield fresh
    fresh.close()
    assert complaints == []


@contextmanager
def opened(page: Page, *folders: Path) -> Iterator[None]:
    """The page of the runs, left before its server ends."""
    with served("watch", *map(str, folders)) as place:
        page.goto(f"http://{place}/")
        yield
        page.goto("about:blank")


def path_of(page: Page, title: str) -> str:
    """The last line of a plot, as it is drawn."""
    lines = page.locator("section", has=page.get_by_role("heading", name=title)).locator(".plot path")
    return str(lines.last.get_attribute("d"))


def marks_of(page: Page, title: str) -> list[str]:
    return (
        page.locator("section", has=page.get_by_role("heading", name=title)).locator(".plot text").all_text_contents()
    )


def test_a_page_follows_a_run_and_then_looks_as_one_opened_anew(page: Page, tmp_path: Path):
    made = run_folder(tmp_path / "made", steps=10)
    folder = tmp_path / "live"
    lines = (made / "metrics.jsonl").read_text().splitlines(keepends=True)
    with opened(page, folder):
        expect(page.locator("#states")).to_contain_text("no folder there yet")
        folder.mkdir()
        (folder / "config.yaml").write_text((made / "config.yaml").read_text())
        (folder / "metrics.jsonl").write_text("".join(lines[:4]))
        expect(page.locator("#states")).to_contain_text("step 3 of 10")
        expect(page.get_by_role("img", name="Learning rate over steps")).to_have_count(1)
        page.evaluate("window.mine = document.querySelector('#view-smooth')")
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(lines[4:])
        (folder / "router.jsonl").write_text((made / "router.jsonl").read_text())
        (folder / "faults.jsonl").write_text(json.dumps({"step": 9, "cause": "a <b>fault</b>", "what": "x"}) + "\n")
        expect(page.locator("#states")).to_contain_text("step 10 of 10, done")
        expect(page.locator(".warnings li").first).to_have_text("step 9: a <b>fault</b>: x")
        expect(page.locator("canvas")).to_have_count(7)
        assert page.evaluate("window.mine === document.querySelector('#view-smooth')"), "the page was not built anew"
        followed = page.locator("main").inner_html()
        page.reload()
        expect(page.locator("canvas")).to_have_count(7)
        assert page.locator("main").inner_html() == followed
        folder.rename(tmp_path / "away")
        expect(page.locator("#states .bad")).to_contain_text("is gone")
        expect(page.locator("canvas")).to_have_count(7)


def test_two_runs_over_steps_tokens_and_time_on_a_log_scale_and_smoothed(page: Page, tmp_path: Path):
    folders = [run_folder(tmp_path / name, steps=10) for name in ("one", "two")]
    with opened(page, *folders):
        norm = "Gradient norm"
        expect(page.get_by_role("img", name=f"{norm}, before clipping over steps")).to_have_count(1)
        plain = path_of(page, norm)
        assert "step" in marks_of(page, norm)
        page.select_option("#view-x", "tokens")
        expect(page.get_by_role("img", name=f"{norm}, before clipping over tokens")).to_have_count(1)
        page.select_option("#view-x", "time")
        assert "time of training steps (s)" in marks_of(page, norm)
        assert "20" in marks_of(page, norm), "ten steps of two seconds"
        page.check("#view-log")
        assert path_of(page, norm) != plain
        assert "0.1" in marks_of(page, norm)
        assert "0" not in marks_of(page, norm)[:5], "a log scale has no zero"
        straight = path_of(page, norm)
        page.locator("#view-smooth").fill("0.9")
        assert path_of(page, norm) != straight
        faint = page.locator("section", has=page.get_by_role("heading", name=norm)).locator(".plot path[opacity]")
        expect(faint).to_have_count(2)
        assert page.url.endswith("#x=time&log=1&smooth=0.9")
        page.reload()
        expect(page.locator("#view-x")).to_have_value("time")
        expect(faint).to_have_count(2)
