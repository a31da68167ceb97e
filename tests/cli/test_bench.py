"""`moefold bench`: the table of subjects."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moefold.cli.bench import SUBJECTS, run_command
from moefold.cli.main import run_command_line

HELP_OF_EVERY_SUBJECT = """
import sys
from moefold.cli.bench import SUBJECTS, run_command
for name in SUBJECTS:
    try:
        run_command([name, "--help"])
    except SystemExit as leaving:
        assert leaving.code == 0, name
assert "torch" not in sys.modules
"""


def test_help_lists_every_subject_with_its_line(capsys: pytest.CaptureFixture[str]):
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, subject in SUBJECTS.items():
        assert f"moefold bench {name} " in shown
        assert subject.summary in shown


def test_help_of_every_subject_comes_without_torch():
    done = subprocess.run([sys.executable, "-c", HELP_OF_EVERY_SUBJECT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"moefold bench {name}" in done.stdout for name in SUBJECTS)


def test_an_unknown_subject_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "kernel"]) == 2
    assert 'no benchmark "kernel" (did you mean "kernels"?)' in capsys.readouterr().err


def test_an_option_of_another_subject_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as refused:
        run_command(["layer", "--steps", "3"])
    assert refused.value.code == 2
    assert "--steps" in capsys.readouterr().err
