"""The watch's page in a browser, while runs go on.

Needs a browser (tests/support/browser.py): where there is none these tests are skipped.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.browser import BROWSER, longest_wait, without_browser
from tests.support.planner_page import served
from tests.support.run_folders import run_folder
from tests.support.runs import SMALL, corpus, metrics, start

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


def test_the_page_of_a_real_run_follows_it_from_before_its_first_step_to_its_end(page: Page, tmp_path: Path):
    folder = tmp_path / "run"
    steps = ["--train.steps", "40", "--train.validate_every", "20"]
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), *steps, "--out", str(folder)]
    with opened(page, folder):
        expect(page.locator("#states")).to_contain_text("no folder there yet")
        run = start(argv, tmp_path / "log")
        try:
            expect(page.locator("#states")).to_contain_text(re.compile(r"step \d+ of 40"))
            expect(page.get_by_role("img", name="Learning rate over steps")).to_have_count(1)
            expect(page.locator("#states")).to_contain_text("step 40 of 40, done")
            expect(page.locator("canvas").first).to_be_visible()
            seen = page.locator("main").inner_text()
        finally:
            run.join(120)
    assert run.exitcode == 0, (tmp_path / "log").read_text()
    assert f"{metrics(folder)[-1]['val_loss']:.3f}"[:4] in seen


def luminance(color: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(ink: str, paper: str) -> float:
    dark, light = sorted((luminance(ink), luminance(paper)))
    return (light + 0.05) / (dark + 0.05)


INKS = """() => {
    const seen = [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && !e.closest('svg'));
    const texts = seen.filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
    const paper = e => {
        while (e && /rgba\\(.*, 0\\)/.test(getComputedStyle(e).backgroundColor)) e = e.parentElement;
        return getComputedStyle(e || document.documentElement).backgroundColor;
    };
    return texts.map(e => [e.textContent.trim().slice(0, 40), getComputedStyle(e).color, paper(e)]);
}"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_the_page_and_every_text_stands_out(page: Page, scheme: Any, tmp_path: Path):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    with opened(page, run_folder(tmp_path / "run", steps=10)):
        expect(page.locator("#states")).to_contain_text("step 10 of 10, done")
        expect(page.locator("canvas").first).to_be_visible()
        assert page.evaluate(OVERFLOW) == 0
        texts = page.evaluate(INKS)
    assert len(texts) > 20
    faint = [text for text, ink, paper in texts if contrast(ink, paper) < 4.5]
    assert not faint


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
