"""The commands of README.md and docs/ run, those of a page in their order, and print what the page says."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.doc_commands import PAGES, ROOT, DocCommand
from tests.support.document_commands import (
    NOT_RUN,
    ON_A_GPU,
    WHOLE_ON_A_GPU,
    added_words,
    commands_of_a_gpu,
    commands_run_here,
    is_slow,
    page_commands,
    run_document_command,
)

pytestmark = pytest.mark.timeout(1800)  # a page has many commands

README = ROOT / "README.md"
IN_SAMPLE = ("docs/fine_tuning.md", "docs/schedules.md", "docs/tuning.md")


@pytest.fixture
def folder(document_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(document_folder, tmp_path / "page")


def run_commands(commands: Sequence[DocCommand], folder: Path) -> None:
    assert commands
    for command in commands:
        run_document_command(command, folder)


def pages() -> list[object]:
    cases: list[object] = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        marks = [] if name in IN_SAMPLE else [pytest.mark.extended]
        if page != README and commands_run_here(page):
            cases.append(pytest.param(page, id=name, marks=marks))
    return cases


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page_run(page: Path, folder: Path):
    run_commands(commands_run_here(page), folder)
    for drawn in folder.glob("docs/schedules/*.svg"):
        assert drawn.read_text() == (ROOT / "docs/schedules" / drawn.name).read_text(), f"{drawn.name} is old"


def test_the_commands_of_the_readme_run(folder: Path):
    run_commands([each for each in commands_run_here(README) if not is_slow(each)], folder)


@pytest.mark.extended
def test_the_slow_commands_of_the_readme_run(folder: Path):
    run_commands([each for each in commands_run_here(README) if is_slow(each)], folder)


# ---- the lists


@pytest.mark.parametrize("start", [*ON_A_GPU, *WHOLE_ON_A_GPU, *NOT_RUN])
def test_what_is_listed_is_a_command_of_some_page(start: str):
    assert any(command.text.startswith(start) for page in PAGES for command in page_commands(page))


@pytest.mark.parametrize("reason", NOT_RUN.values())
def test_what_nothing_here_runs_names_the_test_that_shows_it(reason: str):
    assert (ROOT / reason.rpartition("; ")[2]).is_file()


def test_a_gpu_runs_each_listed_command_once_as_it_is_written():
    texts = commands_of_a_gpu([])
    assert len(set(texts)) == len(texts) > 10
    assert commands_of_a_gpu(["--part", "offload"]) == ["moefold bench memory --part offload"]


# ---- planted faults are found


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (DocCommand("moefold eval runs/nothing", []), "ends with 2"),
        (DocCommand("moefold simulate --pp 2 --microbatches 3", ["makespan 3"]), "not printed"),
        (DocCommand("moefold presets", ["moefold: no preset"]), "ends with 0"),
    ],
)
def test_a_command_that_fails_or_prints_something_else_is_found(command: DocCommand, says: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=says):
        run_document_command(command, tmp_path)


def test_keys_of_size_are_added_to_runs_alone():
    assert added_words(["plan", "tiny"]) == []
    assert "--model.hidden=32" in added_words(["train", "tiny"])
    assert "--model.hidden=32" not in added_words(["train", "tiny", "--model.hidden", "16"])
    assert "--model.hidden=32" not in added_words(["train", "--from-hf", "DIR"])
