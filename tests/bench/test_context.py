"""`moefold bench context` as a person meets it."""

from __future__ import annotations

import json

import pytest

from moefold.cli.main import run_command_line

SMALL = ["tiny", "--gpus", "4", "--ep", "2", "--limit", "512", "--tokens", "16384", "--median", "200"]
SMALL += ["--longest", "2048", "--batches", "1"]


@pytest.mark.parametrize("pp", ["1", "2"])
def test_figures_are_told_and_those_of_a_pipeline_are_of_one_rank(pp: str, capsys: pytest.CaptureFixture[str]):
    longest = ["--longest", "1024", "--pp", pp]
    assert run_command_line(["bench", "context", *SMALL, *longest, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    ways = {row["way"]: row for row in report["results"]}
    assert list(ways) == ["static", "static, even", "dynamic"]
    assert all(0 <= row["lost"] < 1 for row in ways.values())
    assert ways["dynamic"]["gb"] < ways["static"]["gb"]
    assert run_command_line(["bench", "context", *SMALL, *longest]) == 0
    assert f"dynamic is {report['ratio']:.2f} x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--longest", "4096"], "--longest 4096 is more than 2048 tokens"),
        (["--pp", "3"], "--pp 3 does not divide --gpus 4"),
        (["--sigma", "-1"], "--sigma at least 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "context", *SMALL, *words]) == 2
    assert problem in capsys.readouterr().err
