"""`moefold bench calibrate` on this CPU: what it writes, the planner reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import run_command_line
from moefold.plan.machine.gpu import find_gpu_by_name


def test_the_file_it_writes_is_a_gpu_to_plan_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "here.yaml"
    assert (
        run_command_line(
            ["bench", "calibrate", "--device", "cpu", "--scale", "64", "--repeat", "1", "--out", str(path)]
        )
        == 0
    )
    machine = find_gpu_by_name(str(path))
    assert machine.name == "CPU"
    assert machine.origin.startswith("measured 20")
    assert machine.precisions == ["bf16"]
    assert machine.host.launch > 0
    capsys.readouterr()
    assert run_command_line(["plan", "tiny", "--gpus", "1", "--gpu", str(path), "--parallel.pp", "1", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["step_s"] > 0


@pytest.mark.parametrize("words", [("--repeat", "0"), ("--scale", "0"), ("--out", "nowhere/at/all.yaml")])
def test_bad_options_are_refused(words: tuple[str, ...]):
    assert run_command_line(["bench", "calibrate", *words]) == 2
