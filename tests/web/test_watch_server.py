"""The watch's server: for this machine alone, read only, and nothing but its page and its news."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.planner_page import send, served
from tests.support.run_folders import run_folder
from tests.web.test_report import data_of

NOTHING = [-1, -1, -1, -1, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def place(folder: Path) -> Iterator[str]:
    with served("watch", str(folder), str(folder.parent / "later")) as running:
        yield running


def news(place: str, told: object) -> tuple[int, dict[str, Any]]:
    status, _, body = send(place, "GET", f"/news?told={quote(json.dumps(told))}")
    return status, json.loads(body)


def test_the_page_has_the_runs_and_news_have_what_is_new_alone(place: str):
    status, headers, body = send(place, "GET", "/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    runs = data_of(body.decode())["runs"]
    assert [run["label"] for run in runs] == ["a", "later"]
    assert runs[0]["curves"]["loss"]["mean"][-1] == 4
    assert runs[1]["state"]["text"].startswith("waiting for")
    status, reply = news(place, [run["told"] for run in runs])
    assert (status, [list(run) for run in reply["runs"]]) == (200, [["state"], ["state"]])


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([NOTHING], "the page shows 1 runs, and 2 are watched"),
        ([NOTHING, [1]], "no list of numbers"),
        ([NOTHING, ["x"] * 5], "no list of numbers"),
        ({}, "no list of numbers"),
        ("[" * 1000, "no list of numbers"),
    ],
)
def test_what_no_page_was_told_is_refused(told: object, says: str, place: str):
    status, reply = news(place, told)
    assert status == 400
    assert says in str(reply["problems"])


@pytest.mark.parametrize(("host", "status"), [("localhost:1", 200), ("evil.example", 400)])
def test_a_foreign_name_for_this_machine_is_refused(host: str, status: int, place: str):
    for path in ("/", f"/news?told={quote(json.dumps([NOTHING] * 2))}"):
        assert send(place, "GET", path, headers={"Host": host})[0] == status


def test_nothing_can_be_written_and_no_file_read(place: str, folder: Path):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    for method in ("POST", "PUT", "DELETE"):
        assert send(place, method, "/news", "{}")[0] == 405
        assert send(place, method, "/", "{}")[0] == 405
    for path in ("/metrics.jsonl", "/../config.yaml", "/..%2fconfig.yaml", "//etc/passwd"):
        assert send(place, "GET", path)[0] == 404
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
