"""`moefold bench echo` as a person meets it."""

from __future__ import annotations

import json

import pytest

from moefold.cli.main import run_command_line

SMALL = ["--experts", "8", "--ranks", "2", "--zipf", "1.5", "--draws", "1", "--steps", "2"]


def test_a_row_for_each_case(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "echo", *SMALL, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert (row["ranks"], row["zipf"]) == (2, 1.5)
    assert row["now"] < row["without"]
    assert run_command_line(["bench", "echo", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert f"{row['previous']:.2f}" in shown


@pytest.mark.parametrize("words", [["--ranks", "3"], ["--slots", "0"]], ids=str)
def test_nonsense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "echo", *words]) == 2
    assert words[0] in capsys.readouterr().err
