"""`moefold web` as a person meets it."""

import socket
import subprocess
import sys

import pytest

from moefold.cli.main import run_command_line


def test_without_the_extra_one_line_says_what_to_install():
    hidden = "import sys; sys.modules['starlette'] = None\nfrom moefold.cli.main import run_command_line\n"
    hidden += "sys.exit(run_command_line(['web']))"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "moefold: moefold web needs starlette, which is not installed; run: pip install 'moefold[web]'\n"
    )


def test_a_port_in_use_is_refused_with_a_free_one(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run_command_line(["web", "--no-browser", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be used" in (message := capsys.readouterr().err)
    assert "or try" in message


def test_a_port_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["web", "--no-browser", "--port", "70000"]) == 2
    assert "port 70000 cannot be used" in capsys.readouterr().err
