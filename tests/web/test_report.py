"""The page is one file with everything in it, and nothing of the run can act in it."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moefold.web.report import render_report
from tests.support.browser import BROWSER, without_browser
from tests.support.run_folders import fp8_line, run_folder, write_lines


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_the_data_and_loads_nothing(tmp_path: Path):
    page = render_report([run_folder(tmp_path / "a")])
    assert data_of(page)["runs"][0]["curves"]["loss"]["mean"][-1] == 4
    assert not re.search(r"https?:|//\w+\.\w+|url\(|@import|\bsrc=|\bhref=|<link|<img|fetch\(|import\(", page)
    assert "default-src 'none'" in page, "the browser is told to refuse any request"
    assert "{{" not in page.replace(json.dumps("{{"), ""), "every place of the template was filled"


EVIL = "</script><script>alert(1)</script><!--{{script}}&<b>'\"\u2028"


def test_nothing_of_the_run_can_end_its_element_or_become_markup(tmp_path: Path):
    folder = run_folder(tmp_path / "a</title><b>&{{data}}".replace("/", "\u2215"))
    config = (folder / "config.yaml").read_text().replace("name: tiny", f"name: {json.dumps(EVIL)}\n'<i>': 3")
    (folder / "config.yaml").write_text(config)
    page = render_report([folder])
    assert page.count("<script") == page.count("</script>") == 2
    assert page.count("</title>") == 1
    assert "<b>" not in page
    assert "<i>" not in page
    [run] = data_of(page)["runs"]
    assert dict(run["facts"])["model"].startswith("</script><script>alert(1)")
    assert run["strange"] == ["<i>"]


def test_several_runs_share_one_page_and_are_told_apart_by_name(tmp_path: Path):
    runs = data_of(render_report([run_folder(tmp_path / "on"), run_folder(tmp_path / "off")]))["runs"]
    assert [run["label"] for run in runs] == ["on", "off"]
    same = [run_folder(tmp_path / "x" / "run"), run_folder(tmp_path / "y" / "run")]
    assert [run["label"] for run in data_of(render_report(same))["runs"]] == ["x/run", "y/run"]


def big_run(folder: Path, steps: int, layers: int, experts: int, every: int) -> Path:
    """As long and wide as large runs get, with as many digits; the lines repeat, to be quick to write."""
    run_folder(folder, 1, layers, experts)
    long = [0.123456 + 0.000001 * i for i in range(layers)]
    names = ("max_violation", "load_entropy", "drop_rate")
    each = dict.fromkeys(names, long) | {"dead_experts": [1] * layers, "moved_bytes": [123456789] * layers}
    text = json.dumps(dict.fromkeys(("loss", "grad_norm", "lr", "tokens_per_s", "tflops"), 1.2345678) | each)
    load = json.dumps([[e * e % 1009 for e in range(experts)] for _ in range(layers)])
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "router.jsonl").open("w") as router:
        for step in range(1, steps + 1):
            metrics.write(f'{{"step": {step}, {text[1:]}\n')
            if step % every == 0:
                router.write(f'{{"step": {step}, "load": {load}}}\n')
    return folder


@pytest.mark.extended
def test_a_page_of_sixty_layers_and_256_experts_is_a_few_megabytes_however_long_the_run(tmp_path: Path):
    """The length at which every column there may be is in use: longer runs join steps and have fewer."""
    folder = big_run(tmp_path / "big", 3200, 60, 256, every=25)
    write_lines(folder / "fp8.jsonl", [fp8_line(step, 60, error=0.0123456 + step * 1e-6) for step in range(1, 201)])
    page = render_report([folder])
    assert len(page) < 6e6
    [run] = data_of(page)["runs"]
    columns = [len(told["first"]) for told in (run["curves"]["loss"], run["maps"]["max_violation"], run["load"])]
    assert columns == [800, 400, 128]
    assert run["curves"]["loss"]["last"][-1] == run["load"]["last"][-1] == 3200


def drawn(page: str, tmp_path: Path) -> str:
    """What stands before the scripts when a browser has drawn it; anything it complains about is a failure."""
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=20000", "--enable-logging=stderr"]
    place = [f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", str(tmp_path / "page.html")]
    done = subprocess.run([str(BROWSER), *flags, *place], capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout.partition("<script")[0]


@pytest.mark.page
@without_browser
@pytest.mark.parametrize("runs", [1, 2])
def test_a_browser_draws_every_plot_without_an_error(runs: int, tmp_path: Path):
    document = drawn(render_report([run_folder(tmp_path / f"run-{i}") for i in range(runs)]), tmp_path)
    assert document.count("<canvas") == 7, "five maps of layers, two of experts"
    assert document.count(" over steps") == (7 if runs == 1 else 9), "the curves"


@pytest.mark.page
@without_browser
def test_a_browser_draws_what_the_driver_of_a_gpu_measured(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = {"gpu_watts": 612.5, "gpu_celsius": 61, "gpu_busy": 0.98, "gpu_mhz": 1755}
    write_lines(folder / "metrics.jsonl", [line | (measured if line["step"] % 2 else {}) for line in lines])
    document = drawn(render_report([folder]), tmp_path)
    assert document.count(" over steps") == 7 + 4
    titles = re.findall(r"<h3[^>]*>([^<]*)</h3>", document)
    assert "Power (W)" in titles, titles


@pytest.mark.page
@without_browser
def test_a_browser_draws_a_run_of_which_little_is_known(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    write_lines(folder / "metrics.jsonl", [{"step": 0, "val_loss": 5.5}])
    (folder / "router.jsonl").unlink()
    document = drawn(render_report([folder]), tmp_path)
    assert "not measured in this run" in document
    assert "router.jsonl holds no load" in document


@pytest.mark.page
@without_browser
def test_a_browser_draws_the_figures_of_fp8_operands_and_their_warnings(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    lines = [fp8_line(step, 4) for step in (5, 10)]
    write_lines(folder / "fp8.jsonl", [lines[0], lines[1] | {"warnings": ["warning: layer <b>2</b> grows"]}])
    document = drawn(render_report([folder, run_folder(tmp_path / "plain")]), tmp_path)
    assert document.count("<canvas") == 7 + 5, "error, underflow, largest magnitude, both ends of the scales"
    assert "no value was beyond its scale" in document
    assert "step 10: layer &lt;b&gt;2&lt;/b&gt; grows" in document
