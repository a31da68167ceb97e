"""`moefold watch` as a person meets it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from tests.support.run_folders import run_folder


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command_line(["watch", "--no-browser", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("moefold: ")
    return message


def test_what_is_no_run_and_cannot_become_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder(tmp_path / "runs" / "a")
    assert "no run is given" in refusal([], capsys)
    assert "there are runs inside: " in refusal([str(tmp_path / "runs")], capsys)
    assert "is a file; expected the folder of a run" in refusal([str(folder / "config.yaml")], capsys)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    assert "is no run: it has no config.yaml and no metrics.jsonl" in refusal([str(tmp_path / "other")], capsys)
    assert "is given twice" in refusal([str(folder), str(folder / ".." / "a")], capsys)
    assert "expected at most 8" in refusal([str(folder)] * 9, capsys)


def test_a_port_in_use_is_refused_with_a_free_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run_folder(tmp_path / "a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = refusal([str(folder), "--port", str(taken.getsockname()[1])], capsys)
    assert "cannot be used" in message
    assert "or try" in message


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path):
    hidden = "import sys; sys.modules['starlette'] = None\nfrom moefold.cli.main import run_command_line\n"
    hidden += f"sys.exit(run_command_line(['watch', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.returncode == 2
    assert "moefold watch needs starlette, which is not installed; run: pip install 'moefold[web]'" in done.stderr
