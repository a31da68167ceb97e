"""Evaluations of a run are found again by its report, and nothing else that stands in their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefold.web.evaluations import EVALUATIONS_FILE, read_evaluations, run_folder_of, write_evaluation
from moefold.web.report import render_report
from tests.support.browser import without_browser
from tests.support.run_folders import run_folder
from tests.web.test_report import data_of, drawn

RESULTS = {"notes.txt": {"bits_per_byte": 1.25, "tokens": 200}}


def test_the_last_results_of_each_name_at_each_step_are_told(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    write_evaluation(folder, 10, {"notes.txt": {"bits_per_byte": 9.0}, "lines": {"accuracy": 0.5}})
    write_evaluation(folder, 5, RESULTS)
    write_evaluation(folder, 10, RESULTS)
    figures = [["bits per byte", 1.25], ["tokens", 200]]
    [run] = data_of(render_report([folder]))["runs"]
    assert run["evaluations"] == [
        [5, "notes.txt", figures],
        [10, "lines", [["accuracy", 0.5]]],
        [10, "notes.txt", figures],
    ]


def test_lines_with_nonsense_are_passed_over(tmp_path: Path):
    lines = ["{", "[]", '{"step": 1}', '{"step": 1, "results": [1]}', '{"step": -1, "results": {"a": {"b": 1}}}']
    lines += ['{"step": 2, "results": {"a": [1], "b": {"c": "x", "d": [1]}, "e": {"f": NaN}}}']
    (tmp_path / EVALUATIONS_FILE).write_text("\n".join(lines))
    assert read_evaluations(tmp_path) == [(2, "e", [("f", None)])]
    json.dumps(read_evaluations(tmp_path), allow_nan=False)


def test_a_run_is_found_from_its_folder_and_from_its_checkpoints(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    checkpoint = folder / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    for path in (folder, checkpoint.parent, checkpoint):
        assert run_folder_of(path) == folder.resolve()
    assert run_folder_of(tmp_path) is None


@pytest.mark.page
@without_browser
def test_a_browser_shows_them(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    write_evaluation(folder, 10, {"<b>": {"bits_per_byte": 1.25}})
    document = drawn(render_report([folder]), tmp_path)
    assert "&lt;b&gt;</td><td>bits per byte 1.25</td>" in document
