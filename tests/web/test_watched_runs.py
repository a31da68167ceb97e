"""A page that is told of runs in parts knows what a report says; runs that start late, resume or vanish are told."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from moefold.train.folder_owner import FolderClaims
from moefold.web import metric_series, run_summary, watched_runs
from moefold.web.run_folder import require_run_or_future_run
from moefold.web.run_summary import ToldSteps, summarize_run
from moefold.web.watched_runs import WatchedRuns
from tests.support.run_folders import fp8_line, run_folder, write_lines

BY_COLUMN = ("first", "last", "mean", "low", "high", "values", "codes")
ANEW = ("told", "whole", "state")  # what tells nothing of the run


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watched_runs, "READ_SECONDS", 0.0)


def extended_series(old: dict[str, Any] | None, fresh: dict[str, Any]) -> dict[str, Any]:
    if not old or not fresh["from"]:
        return fresh
    lists = {name: old[name][: fresh["from"]] + fresh[name] for name in BY_COLUMN if name in fresh}
    return {**fresh, **lists}


def extended_run(old: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """As the page does it (page/live.js)."""
    if "curves" not in fresh:
        return {**old, **fresh}
    if fresh["whole"]:
        return fresh
    joined = dict(fresh)
    for group in ("curves", "maps"):
        parts = {name: extended_series(old[group].get(name), series) for name, series in fresh[group].items()}
        joined[group] = {**old[group], **parts}
    for name in ("load", "fp8"):
        joined[name] = extended_series(old[name], fresh[name]) if fresh[name] else old[name]
    return joined


class LivePage:
    """A page that asks for news of one run."""

    def __init__(self, folder: Path):
        self.watched = WatchedRuns([folder])
        self.run: dict[str, Any] = {"told": ToldSteps()}
        self.letters: list[int] = []

    def ask(self) -> dict[str, Any]:
        [fresh] = self.watched.news([ToldSteps(*self.run["told"])])
        text = json.dumps(fresh, allow_nan=False)
        self.letters.append(len(text))
        self.run = extended_run(self.run, json.loads(text))
        return fresh

    @property
    def state(self) -> str:
        return self.run["state"]["text"]


def said(run: dict[str, Any]) -> dict[str, Any]:
    """All that a run's page draws."""
    plain = json.loads(json.dumps(run))
    for series in (*plain["curves"].values(), *plain["maps"].values(), plain["load"] or {}, plain["fp8"] or {}):
        series.pop("from", None)
    return {name: value for name, value in plain.items() if name not in ANEW}


def add_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def metrics_line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 5 / (step + 1), "seconds": 0.5, "max_violation": [step % 5, 1.0], "lr": 1e-3}


def router_line(step: int) -> dict[str, Any]:
    return {"step": step, "layers": [1, 2], "load": [[step, 10, 3, 0], [1, 2, 3, 4 + step % 9]]}


def test_parts_joined_by_a_page_are_what_a_report_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a run long enough that neighbours are merged, twice and more, in maps, curves and loads."""
    monkeypatch.setattr(metric_series, "MAX_CURVE_POINTS", 32)
    monkeypatch.setattr(run_summary, "MAX_MAP_COLUMNS", 16)
    monkeypatch.setattr(run_summary, "MIN_MAP_COLUMNS", 16)
    monkeypatch.setattr(run_summary, "MAX_LOAD_CELLS", 16 * 8)
    folder = run_folder(tmp_path / "a", 1, layers=2)
    write_lines(folder / "metrics.jsonl", [{"step": 0, "val_loss": 5.5}])
    (folder / "router.jsonl").unlink()
    page = LivePage(folder)
    step = 0
    for count in (0, 1, 1, 5, 20, 1, 9, 30, 1, 40, 1):
        steps = range(step + 1, step + 1 + count)
        add_lines(folder / "metrics.jsonl", [metrics_line(each) for each in steps])
        add_lines(folder / "router.jsonl", [router_line(each) for each in steps])
        add_lines(folder / "fp8.jsonl", [fp8_line(each, 2) for each in steps if each % 3 == 0])
        step += count
        page.ask()
        assert said(page.run) == said(summarize_run(folder, "a", 1))
    assert page.run["curves"]["elapsed"]["high"][-1] == pytest.approx(0.5 * step, rel=1e-4)
    whole = len(json.dumps(summarize_run(folder, "a", 1)))
    assert page.letters[-1] < 0.5 * whole, "one step is not the whole run"
    page.ask()
    assert page.letters[-1] < 200, "nothing new: its state alone"


def test_a_run_may_start_later_than_its_watch(tmp_path: Path):
    run_folder(tmp_path / "tiny-1")
    folder = tmp_path / "tiny-2"
    page = LivePage(folder)
    page.ask()
    assert page.state.startswith(f"waiting for {folder}: no folder there yet (did you mean")
    folder.mkdir()
    page.ask()
    assert page.state.startswith("waiting for the first step")
    other = run_folder(tmp_path / "made")
    shutil.copy(other / "config.yaml", folder)
    (folder / "metrics.jsonl").touch()
    page.ask()
    assert page.state == "waiting for the first line of metrics.jsonl"
    assert dict(page.run["facts"])["model"] == "tiny"
    add_lines(folder / "metrics.jsonl", [metrics_line(1)])
    page.ask()
    assert page.state.startswith("step 1 of 10, last line ")
    assert page.run["curves"]["loss"]["mean"] == [2.5]


def test_a_folder_that_vanishes_is_told_and_what_was_read_stays_until_another_run_is_there(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    page = LivePage(folder)
    page.ask()
    assert page.state == "step 10 of 10, done"
    before = said(page.run)
    folder.rename(tmp_path / "away")
    page.ask()
    assert f"{folder} is gone" in page.state
    assert page.run["state"]["is_bad"]
    assert said(page.run) == before
    run_folder(folder, steps=3)
    page.ask()
    assert page.state == "step 3 of 3, done"
    assert said(page.run) == said(summarize_run(folder, "a", 1))


def test_a_resumed_run_is_told_anew(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    page = LivePage(folder)
    page.ask()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]))
    page.ask()
    assert page.run["curves"]["loss"]["last"] == [1, 2, 3, 4]
    add_lines(folder / "metrics.jsonl", [metrics_line(5)])
    page.ask()
    assert said(page.run) == said(summarize_run(folder, "a", 1))


def test_faults_and_restarts_are_told_without_a_new_step(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    page = LivePage(folder)
    page.ask()
    assert page.run["faults"] == []
    add_lines(folder / "faults.jsonl", [{"step": 4, "cause": "not finite", "what": "loss \x1b[31m"}])
    add_lines(folder / "restarts.jsonl", [{"step": 4, "cause": "rank 1 killed", "restart": 1, "resume": "auto"}])
    page.ask()
    assert page.run["faults"][0]["text"] == "not finite: loss \\x1b[31m"
    assert "restart 1 from auto" in page.run["faults"][1]["text"]
    assert dict(page.run["facts"])["restarts"] == "1 (step 4: rank 1 killed)"


def test_a_run_that_is_silent_or_cannot_be_read_is_told(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    write_lines(folder / "metrics.jsonl", [metrics_line(1)])
    an_hour_ago = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (an_hour_ago, an_hour_ago))
    page = LivePage(folder)
    page.ask()
    assert page.state == "step 1 of 10; no line for 60 min: the run may have ended"
    (folder / "config.yaml").write_text("train: [")
    page.ask()
    assert "config.yaml" in page.state
    assert page.run["state"]["is_bad"]


def test_a_run_that_has_just_claimed_its_folder_may_be_watched(tmp_path: Path):
    folder = tmp_path / "a"
    folder.mkdir()
    claims = FolderClaims()
    claims.claim(folder)
    (folder / "checkpoints").mkdir()
    require_run_or_future_run(folder)
    claims.release()
