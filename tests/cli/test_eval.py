"""`moefold eval` as a person meets it: a run, a published model, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefold.cli import eval as eval_command
from moefold.cli.main import run_command_line
from moefold.observe.metrics import read_records
from tests.support.runs import SMALL, corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    argv = ["train", "tiny", *SMALL, *corpus(folder), "--train.device", "cpu", "--out", str(folder / "out")]
    assert run_command_line([*argv, "--train.steps", "2", "--checkpoint.every", "2"]) == 0
    return folder / "out"


def test_files_and_the_built_in_task_are_scored(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x\n" * 20)
    words = ["eval", str(run), "--files", str(text), "--device", "cpu"]
    capsys.readouterr()
    assert run_command_line([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"][str(text)]
    assert found["bytes"] == len(text.read_text())
    assert 0 < found["bits_per_byte"] < 20
    assert run_command_line([*words, "--tasks", "stdlib_lines"]) == 0
    table = capsys.readouterr().out
    assert "bits per byte" in table
    assert "accuracy" in table


@pytest.mark.extended
def test_several_ranks_have_the_results_of_one_and_the_run_keeps_them(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(40)))
    words = ["eval", str(run), "--files", str(text), "--device", "cpu", "--dtype", "fp64", "--batch", "2", "--json"]
    found: list[dict[str, float]] = []
    for layout in ([], ["--nproc", "2"], ["--nproc", "2", "parallel.ep=2"]):
        capfd.readouterr()
        assert run_command_line([*words, *layout]) == 0
        told = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert told["step"] == 2
        found.append(told["results"][str(text)])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] == pytest.approx(found[2], rel=1e-12)
    kept = [record["results"][str(text)] for record in read_records(run / "evaluations.jsonl")[-3:]]
    assert kept == found


def test_a_task_of_the_harness_is_refused_with_the_cure_where_the_harness_is_missing(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(eval_command, "find_spec", lambda _: None)
    assert run_command_line(["eval", str(run), "--tasks", "stdlib_lines,stdlib_line"]) == 2
    said = capsys.readouterr().err
    assert 'did you mean "stdlib_lines"?' in said
    assert "pip install 'moefold[eval]'" in said


REFUSED = {
    "no batch": (["--batch", "0"], "batch = 0"),
    "no file": (["--files", "nowhere.txt"], "nowhere.txt"),
    "no folder of tasks": (["--task-folder", "nowhere"], "--task-folder nowhere"),
    "a chat without tasks": (["--chat"], "--chat acts on tasks of lm-evaluation-harness alone"),
    "no ranks": (["--nproc", "0"], "--nproc 0"),
    "a layout of more ranks": (["--parallel.ep", "2"], "does not divide the number of ranks, 1"),
    "a layout that cuts no model so": (["--nproc", "3", "--parallel.ep", "3"], "parallel.ep = 3 does not divide"),
    "a key of training": (["--train.steps", "5"], "eval takes keys of the section parallel alone, not train.steps"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_exit_code_2(what: str, run: Path, capsys: pytest.CaptureFixture[str]):
    words, says = REFUSED[what]
    assert run_command_line(["eval", str(run), "--device", "cpu", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["eval", "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
