"""`moefold report` as a person meets it."""

from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from tests.support.run_folders import run_folder, write_lines


def test_a_report_is_written_into_the_runs_folder_and_its_place_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = run_folder(tmp_path / "a")
    assert run_command_line(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"wrote {folder / 'report.html'}" in capsys.readouterr().out


def test_a_comparison_is_written_beside_the_first_runs_report_and_out_goes_anywhere(tmp_path: Path):
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    assert run_command_line(["report", str(a), str(b)]) == 0
    assert (a / "comparison.html").exists()
    assert not (a / "report.html").exists()
    assert run_command_line(["report", str(a), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command_line(["report", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("moefold: ")
    return message


def test_a_folder_that_is_not_there_is_refused_with_the_nearest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_folder(tmp_path / "tiny-1")
    message = refusal([str(tmp_path / "tiny-2")], capsys)
    assert f'no folder {tmp_path / "tiny-2"} (did you mean "{tmp_path / "tiny-1"}"?)' in message
    assert "expected the folder of a run" in message


def test_a_folder_that_is_no_run_is_refused_with_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "other").mkdir()
    message = refusal([str(tmp_path / "other")], capsys)
    assert "is no run: it has no config.yaml and no metrics.jsonl; give a folder `moefold train` wrote" in message
    run_folder(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").unlink()
    assert "it has no config.yaml;" in refusal([str(tmp_path / "a")], capsys)


def test_the_folder_above_the_runs_is_refused_with_the_runs_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_folder(tmp_path / "a")
    assert "there are runs inside: " in refusal([str(tmp_path)], capsys)


def test_a_file_is_refused_with_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder(tmp_path / "a")
    message = refusal([str(folder / "metrics.jsonl")], capsys)
    assert "is a file; expected the folder of a run, such as " in message


@pytest.mark.parametrize("text", ["", "not json\n", '{"loss": 3}\n', '{"step": -1}\n'])
def test_a_run_without_a_single_step_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder(tmp_path / "a")
    (folder / "metrics.jsonl").write_text(text)
    assert "holds no step; expected one line per step" in refusal([str(folder)], capsys)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("text", ["train: [", "- 1\n", "preset: nope\n"])
def test_a_configuration_that_cannot_be_read_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder(tmp_path / "a")
    (folder / "config.yaml").write_text(text)
    assert "config.yaml" in (message := refusal([str(folder)], capsys)) or "nope" in message


def test_no_run_the_same_run_twice_and_too_many_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder(tmp_path / "a")
    assert "no run is given" in refusal([], capsys)
    assert "is given twice" in refusal([str(folder), str(folder / ".." / "a")], capsys)
    assert "expected at most 8" in refusal([str(folder)] * 9, capsys)


def test_an_out_that_is_a_folder_is_refused_with_a_file_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder(tmp_path / "a")
    message = refusal([str(folder), "--out", str(tmp_path)], capsys)
    assert "is a folder; expected a file" in message
    assert str(tmp_path / "report.html") in message


def test_a_run_that_still_goes_on_is_told_as_far_as_it_got(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    write_lines(folder / "metrics.jsonl", [{"step": 0, "val_loss": 5.5}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 4.')
    assert run_command_line(["report", str(folder)]) == 0
