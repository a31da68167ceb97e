"""`moefold bench save` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from tests.support.runs import SMALL, command, corpus


@pytest.mark.extended
def test_it_tells_bandwidth_beside_plain_writing_and_the_delay_of_a_step(tmp_path: Path):
    argv = ["bench", "save", "tiny", *SMALL, *corpus(tmp_path), "--mib", "3", "--repeat", "1", "--out", str(tmp_path)]
    code, said = command([*argv, "--json"], tmp_path / "log")
    assert code == 0, said
    found = json.loads(said)
    assert found.keys() == {"plain", "direct", "checkpoint", "step", "step_with_save", "state_bytes"}
    assert all(value > 0 for value in found.values())
    assert {p.name for p in tmp_path.iterdir()} == {"corpus.txt", "log"}, "nothing is left on the disk"


@pytest.mark.parametrize("words", [["--mib", "0"], ["--repeat", "0"]], ids=str)
def test_nonsense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "save", *words]) == 2
    assert "--mib and --repeat must be at least 1" in capsys.readouterr().err
