"""The planner's page in a browser: sliders, charts, search, address, keyboard, a phone's width.

Needs a browser (tests/support/browser.py): where there is none these tests are skipped.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from moefold.plan.answer import answer_request
from tests.support.browser import BROWSER, longest_wait, without_browser
from tests.support.planner_page import served

pytestmark = [pytest.mark.page, without_browser]

SMALL = {"model": "qwen3-30b-a3b-tiny", "gpus": "8", "gpu": "h100", "seq": "1024", "gbs": "64", "mbs": "1"}
LAYOUT = {"parallel.pp": "2", "pipeline.vpp": "2", "parallel.ep": "4", "overlap": "false"}


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with served() as running:
        yield f"http://{running}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page; anything that breaks in it, or that its policy forbids, is a failure."""
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.set_default_timeout(longest_wait())
    expect.set_options(timeout=longest_wait())
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda message: complaints.append(message.text) if is_fault(message.text) else None)
    yield opened
    opened.close()
    assert complaints == []


def is_fault(text: str) -> bool:
    return "status of 4" not in text  # a refusal is an answer


def open_at(page: Page, place: str, **changes: str) -> None:
    state = {**SMALL, **LAYOUT, **{key.replace("__", "."): value for key, value in changes.items()}}
    page.goto(place + "#" + "&".join(f"{key}={value}" for key, value in state.items()))
    expect(page.locator(".verdict")).to_have_class(re.compile("good|bad"))


def state_of(page: Page) -> dict[str, str]:
    return page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")


def press(page: Page, control: str, key: str) -> None:
    page.focus(f"#{control}")
    page.keyboard.press(key)


def test_what_is_shown_is_what_the_planner_says(page: Page, place: str):
    open_at(page, place)
    found = answer_request({**SMALL, **LAYOUT})
    need = sum(found["memory_parts_by_rank"][found["largest_rank"]["rank"]].values())
    expect(page.locator(".verdict h2")).to_have_text(
        f"✓ Fits: {need:.1f} of {found['memory_limit_gib']:.1f} GiB on the fullest rank"
    )
    bars = page.get_by_role("group", name="Memory by pipeline rank")
    assert bars.locator("rect[fill]").count() == 2 * sum(
        any(rank[part] for rank in found["memory_parts_by_rank"]) for part in found["memory_parts_by_rank"][0]
    )
    expect(page.get_by_role("group", name="The pipeline")).to_have_attribute(
        "aria-label", re.compile(f"2 ranks, {len(found['timeline']['spans'])} slots")
    )
    walls = page.get_by_role("group", name="Where the time of a step goes").locator("rect[fill]")
    assert walls.count() == sum(seconds > 0 for seconds in found["time_by_wall"].values())


def test_what_does_not_fit_greys_out_its_cost_and_says_what_would(page: Page, place: str):
    large = {"model": "qwen3-30b-a3b", "mbs": "4", "parallel.pp": "1", "pipeline.vpp": "1", "parallel.ep": "8"}
    open_at(page, place, **{key.replace(".", "__"): value for key, value in large.items()})
    expect(page.locator(".verdict h2")).to_contain_text("Does not fit")
    expect(page.locator(".tile.grey")).to_have_count(2)
    expect(page.locator(".remedies")).to_contain_text("--gpus")
    expect(page.locator("details.launch")).to_have_count(0)


def test_a_plan_shows_its_launch_files_or_what_the_trainer_lacks(page: Page, place: str):
    open_at(page, place)
    expect(page.locator(".tile.grey")).to_have_count(0)
    page.get_by_text("to launch").click()
    files = answer_request({**SMALL, **LAYOUT})["launch"]
    assert page.locator("details.launch pre").all_inner_texts() == list(files.values())
    open_at(page, place, precision="fp8")
    expect(page.locator(".verdict .problem")).to_have_text("Not in the trainer yet: precision fp8.")
    expect(page.locator("details.launch")).to_have_count(0)


def test_sliders_step_over_legal_values_and_others_follow_then_back_leads_back(page: Page, place: str):
    open_at(page, place)
    press(page, "c-parallel-pp", "ArrowRight")
    expect(page.locator(".followed")).to_have_text("Changed to keep the layout legal: vpp 2 → 1, ep 4 → 2.")
    assert {key: state_of(page)[key] for key in ("parallel.pp", "pipeline.vpp", "parallel.ep")} == {
        "parallel.pp": "4",
        "pipeline.vpp": "1",
        "parallel.ep": "2",
    }
    expect(page.locator("#c-parallel-ep")).to_have_attribute("aria-valuetext", "2")
    page.go_back()
    expect(page.locator("#c-parallel-ep")).to_have_attribute("aria-valuetext", "4")
    expect(page.locator("#c-parallel-pp")).to_have_attribute("aria-valuetext", "2")
    page.go_forward()
    expect(page.locator("#c-parallel-pp")).to_have_attribute("aria-valuetext", "4")


def test_the_address_makes_the_same_page_again(page: Page, place: str):
    open_at(page, place)
    press(page, "c-mbs", "ArrowRight")
    expect(page.locator("#c-mbs")).to_have_attribute("aria-valuetext", "2")
    expect(page).to_have_url(re.compile("mbs=2"))
    said = page.inner_text(".verdict h2")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(page.locator(".verdict h2")).to_have_text(said)
    expect(page.locator("#c-mbs")).to_have_attribute("aria-valuetext", "2")


def test_a_layout_that_cannot_be_is_told_beside_its_control_with_the_nearest(page: Page, place: str):
    open_at(page, place, parallel__ep="3")
    expect(page.locator(".verdict h2")).to_have_text("✗ Not possible")
    beside = page.locator("#c-parallel-ep-problem")
    expect(beside).to_contain_text("parallel.ep = 3 does not divide model.moe.experts = 8")
    expect(page.locator("#c-parallel-ep")).to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="take the nearest: ep 4").click()
    expect(page.locator(".verdict h2")).to_contain_text("Fits")
    expect(beside).to_be_hidden()


def test_what_a_key_gets_wrong_is_told_with_a_near_name_and_as_text(page: Page, place: str):
    open_at(page, place)
    page.fill("#c-other", "optim.momets=bf16 <img>=1")
    page.keyboard.press("Enter")
    problems = page.locator(".verdict li")
    expect(problems).to_have_count(2)
    expect(problems.filter(has_text="optim.moments")).to_contain_text('no key "optim.momets"')
    expect(problems.filter(has_text="<img>")).to_have_count(1)
    assert page.locator("img").count() == 0


def test_the_search_fills_a_table_and_a_front_and_a_layout_is_taken_over(page: Page, place: str):
    open_at(page, place)
    page.get_by_role("button", name="Find the best layouts").click()
    rows = page.locator("table.numbers tbody tr", has=page.get_by_role("button"))
    expect(rows).to_have_count(10)
    searched = answer_request({**{key: value for key, value in SMALL.items() if key != "mbs"}, "search": True})
    assert [each["text"] for each in searched["layouts"]] == rows.get_by_role("button").all_inner_texts()
    dots = page.get_by_role("group", name="Memory against speed").locator("circle")
    assert dots.count() == len(searched["front"])
    stands = page.get_by_role("heading", name="Best layouts for qwen3-30b-a3b-tiny on 8 x H100")
    rows.nth(1).get_by_role("button").click()
    expect(rows.nth(1)).to_have_class("now")
    taken = searched["layouts"][1]["layout"]
    assert state_of(page)["parallel.tp"] == str(taken["tp"])
    assert state_of(page)["recompute"] == ",".join(taken["recompute"])
    shown = answer_request({**{k: v for k, v in state_of(page).items() if v}, "recompute": state_of(page)["recompute"]})
    assert shown["memory_gib"] == pytest.approx(searched["layouts"][1]["memory_gib"])
    expect(stands).not_to_contain_text("changed")
    press(page, "c-seq", "ArrowRight")
    expect(stands).to_contain_text("settings have changed since")
    expect(rows.nth(1)).not_to_have_class("now")


def test_plans_are_pinned_and_compared_by_what_differs(page: Page, place: str):
    open_at(page, place)
    pin = page.get_by_role("button", name="pin to compare")
    pin.click()
    expect(pin).to_be_disabled()
    press(page, "c-mbs", "ArrowRight")
    expect(page).to_have_url(re.compile("mbs=2"))
    table = page.locator("table.sides")
    expect(table.locator("tr.setting")).to_have_text(["Microbatch21"])
    speeds = table.locator("tr", has_text="tokens/s a GPU").locator("td").all_inner_texts()
    found = [answer_request({**SMALL, **LAYOUT, "mbs": mbs})["tokens_per_s_per_gpu"] for mbs in ("2", "1")]
    assert [float(text.replace(",", "")) for text in speeds] == pytest.approx(found, rel=1e-3)
    expect(table.locator(".best")).to_have_count(1)
    page.get_by_role("button", name="apply pinned plan 1").click()
    expect(page).to_have_url(re.compile("mbs=1"))
    page.get_by_role("button", name="remove pinned plan 1").click()
    expect(table).to_be_hidden()
    expect(pin).to_be_enabled()


def test_a_curve_of_what_if_has_the_planners_figures_and_a_point_is_taken_over(page: Page, place: str):
    open_at(page, place)
    page.get_by_label("key that is varied").select_option("mbs")
    page.get_by_role("button", name="draw").click()
    curve = page.get_by_role("group", name="What if")
    expect(curve.locator("circle")).to_have_count(5)
    page.locator("section", has=curve).get_by_text("the same as a table").click()
    rows = page.locator("section", has=curve).locator("tbody tr")
    second = rows.nth(1).locator("td").first
    planned = answer_request({**SMALL, **LAYOUT, "mbs": "2"})["tokens_per_s_per_gpu"]
    assert float(second.inner_text().replace(",", "")) == pytest.approx(planned, rel=1e-3)
    curve.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("mbs=2"))
    expect(page.locator("section", has=curve)).to_contain_text("as it was before")


def test_a_pasted_model_becomes_keys_of_the_address_and_leaves_with_another_model(page: Page, place: str):
    open_at(page, place)
    page.get_by_text("own model").click()
    page.fill("#own-text", '{"model_type": "bert"}')
    page.get_by_role("button", name="use this model").click()
    expect(page.locator(".own .problem")).to_contain_text("there are: deepseek_v2")
    page.fill("#own-text", json.dumps({"model_type": "mixtral", "num_hidden_layers": 4}))
    page.get_by_role("button", name="use this model").click()
    expect(page).to_have_url(re.compile("model=mixtral-8x7b.*model.layers=4"))
    expect(page.locator("#c-other")).to_have_value(re.compile("model.layers=4"))
    page.select_option("#c-model", "olmoe-1b-7b")
    expect(page).to_have_url(re.compile("model=olmoe-1b-7b"))
    assert "model.layers" not in state_of(page)


@pytest.mark.extended
def test_a_search_can_be_cancelled_and_one_that_finds_nothing_says_why(page: Page, place: str):
    open_at(page, place, model="deepseek-v3", seq="4096", parallel__pp="1", pipeline__vpp="1")
    expect(page.locator(".verdict h2")).to_contain_text("Does not fit")
    find = page.get_by_role("button", name="Find the best layouts")
    find.click()
    expect(find).to_be_disabled()
    page.get_by_role("button", name="cancel").click()
    expect(find).to_be_enabled()
    page.fill("#c-gpus-number", "1")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("gpus=1&"))
    find.click()
    expect(page.locator("#results")).to_contain_text("no layout of deepseek-v3 fits 1 x H100")


def test_everything_works_with_the_keyboard_alone(page: Page, place: str):
    open_at(page, place)
    unnamed = page.evaluate(
        """[...document.querySelectorAll("input, select, button, [tabindex='0']")]
        .filter((e) => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).map((e) => e.id)"""
    )
    assert unnamed == []
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        at: dict[str, Any] = page.evaluate(
            """(() => { const e = document.activeElement;
            const name = e === document.body ? "" : e.id || e.getAttribute("aria-label") || e.textContent;
            return { name, ring: getComputedStyle(e).outlineStyle } })()"""
        )
        assert not at["name"] or at["ring"] != "none", at
        reached.append(at["name"])
    assert {"c-model", "c-parallel-tp", "c-overlap", "c-other", "theme", "Find the best layouts"} <= set(reached)
    charts = page.get_by_role("group", name="Memory by pipeline rank")
    charts.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("rank 0: weights")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tip")).to_contain_text("rank 1: weights")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen_and_texts_stand_out(browser: Browser, place: str, scheme: Any):
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    expect.set_options(timeout=longest_wait())
    open_at(page, place)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    expect(page.locator("#brief")).to_contain_text("fits")
    pairs = page.evaluate(
        """["body", ".note", ".verdict h2 b", ".doc"].map((name) => [name,
        getComputedStyle(document.querySelector(name)).color,
        getComputedStyle(document.querySelector(".card")).backgroundColor])"""
    )
    low = [name for name, ink, ground in pairs if contrast(ink, ground) < 4.5]
    assert low == [], "texts need a contrast of 4.5 (WCAG AA)"
    page.close()


def contrast(one: str, other: str) -> float:
    lights = sorted((luminance(one), luminance(other)), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def luminance(colour: str) -> float:
    red, green, blue = (
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
        for x in (int(c) / 255 for c in re.findall(r"\d+", colour)[:3])
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_late_answer_to_an_earlier_question_is_dropped(page: Page, place: str):
    """The first answer is held back until the second has been shown."""
    open_at(page, place)
    held: list[Any] = []

    def hold_first(route: Any) -> None:
        if json.loads(route.request.post_data)["mbs"] == "2":
            held.append(route)
        else:
            route.continue_()

    page.route("**/answer", hold_first)
    press(page, "c-mbs", "ArrowRight")
    expect(page).to_have_url(re.compile("mbs=2"))
    press(page, "c-mbs", "ArrowRight")
    expect(page.locator(".verdict .note")).to_contain_text("microbatches of 4")
    for route in held:
        route.abort()
    page.wait_for_timeout(300)
    expect(page.locator(".verdict .note")).to_contain_text("microbatches of 4")


def test_beside_the_figures_stand_band_warning_and_advice(page: Page, place: str):
    open_at(page, place, gpu="b200")
    found = answer_request({**SMALL, **LAYOUT, "gpu": "b200"})
    expect(page.locator(".band")).to_contain_text(found["error_band"]["text"])
    expect(page.locator(".verdict .problem")).to_contain_text(found["error_band"]["warning"])
    page.locator(".advice summary").click()
    expect(page.locator(".advice li")).to_have_count(len(found["advice"]))
    expect(page.locator(".advice li").first).to_contain_text(found["advice"][0]["text"])


def test_an_own_price_changes_the_cost_alone_and_stays_in_the_address(page: Page, place: str):
    open_at(page, place)
    found = answer_request({**SMALL, **LAYOUT, "tokens": "1e12"})
    cost = page.locator(".tile", has_text="GPU hours")
    before = cost.inner_text()
    page.fill("#c-price", "1000")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("price=1000"))
    expect(cost.locator("b")).not_to_have_text(before.splitlines()[0])
    dollars = page.evaluate("(x) => short(x)", 1000 * found["budget"]["gpu_hours"])
    expect(cost.locator("b")).to_have_text(f"${dollars}")
    expect(page.locator("details code").first).not_to_contain_text("price")


def test_every_figure_of_speed_has_the_band_of_the_speed(page: Page, place: str):
    open_at(page, place)
    found = answer_request({**SMALL, **LAYOUT, "tokens": "1e12"})
    bands = page.locator(".tile .range").all_inner_texts()
    assert len(bands) == 6
    band, speed = found["error_band"], found["tokens_per_s_per_gpu"]
    low, high = (page.evaluate("(x) => count(x)", band[end]) for end in ("low", "high"))
    assert bands[0] == f"{low} to {high}"
    days = [page.evaluate("(x) => short(x)", found["budget"]["days"] * speed / band[end]) for end in ("high", "low")]
    assert bands[4] == " to ".join(days)


def test_the_files_of_a_launch_are_saved_as_they_are_shown(page: Page, place: str):
    open_at(page, place)
    page.get_by_text("to launch").click()
    for name, text in answer_request({**SMALL, **LAYOUT, "tokens": "1e12"})["launch"].items():
        with page.expect_download() as saved:
            page.get_by_role("button", name=f"save {name}").click()
        assert saved.value.suggested_filename == name
        assert saved.value.path().read_text() == text


@pytest.mark.parametrize("width", [390, 1300])
def test_the_verdict_is_in_sight_at_once_and_wherever_the_page_is_scrolled(page: Page, place: str, width: int):
    page.set_viewport_size({"width": width, "height": 800})
    open_at(page, place)
    expect(page.locator("#brief")).to_be_in_viewport()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    expect(page.locator("#brief")).to_be_in_viewport()
    expect(page.locator("#brief")).to_contain_text("fits")
