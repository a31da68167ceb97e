"""A run folder that version 0.1.0 wrote: its old keys are mapped, its checkpoint verifies, and the run resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from tests.support.runs import command, corpus, metrics

EARLIER = Path(__file__).parent.parent / "data" / "run-0.1.0"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EARLIER, tmp_path / "run", symlinks=True))


def test_its_checkpoint_verifies(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["ckpt", "verify", str(run_folder)]) == 0
    assert capsys.readouterr().out.startswith("sound: ")


def test_it_resumes_where_it_stopped(run_folder: Path, tmp_path: Path):
    argv = ["train", str(run_folder / "config.yaml"), *corpus(tmp_path), "--train.steps", "4"]
    code, output = command([*argv, "--out", str(run_folder), "--resume", "auto"], tmp_path / "log")
    assert code == 0, output
    assert "at step 2" in output
    steps = [line["step"] for line in metrics(run_folder)]
    assert steps[-1] == 4
    first, *_, last = sorted(path.name for path in (run_folder / "checkpoints").glob("step-*"))
    assert (first, last) == ("step-00000002", "step-00000004")
