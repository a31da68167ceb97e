"""Completion scripts: they name commands, options, keys, legal values and presets; bash completes with them."""

import subprocess

import pytest

from moefold.cli.command_list import COMMANDS
from moefold.cli.main import run_command_line
from moefold.presets.zoo import PRESETS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command_line(["--print-completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_commands_options_keys_and_presets(shell: str, capsys: pytest.CaptureFixture[str]):
    words = script(shell, capsys).replace("'", " ").replace('"', " ").split()
    assert set(COMMANDS) <= set(words)
    assert {"--train.steps", "--nproc", "--no-browser", "kernels", "parity", "verify", "mla"} <= set(words)
    assert PRESETS.keys() <= set(words)


@pytest.mark.parametrize("words", [["--print-completion", "ksh"], ["--print-completion"]])
def test_another_shell_is_refused_with_those_there_are(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command_line(words) == 2
    assert "bash, fish, zsh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moefold tr", ["train"]),
        ("moefold train qwen3-235b-a22b-", ["qwen3-235b-a22b-tiny"]),
        ("moefold train tiny --train.st", ["--train.steps", "--train.step_timeout"]),
        ("moefold train tiny --npr", ["--nproc"]),
        ("moefold train tiny --model.attention.kind m", ["mla"]),
        ("moefold bench k", ["kernels"]),
        ("moefold bench kernels --re", ["--repeat"]),
        ("moefold bench kernels --dtype fp6", ["fp64"]),
        ("moefold doctor pa", ["parity"]),
        ("moefold doctor parity --wo", ["--world"]),
        ("moefold ckpt ver", ["verify"]),
        ("moefold simulate --train.st", []),
    ],
)
def test_bash_completes_with_it(line: str, expected: list[str], capsys: pytest.CaptureFixture[str]):
    words = " ".join(f"'{word}'" for word in line.split())
    count = len(line.split()) - 1
    ask = f"COMP_WORDS=({words}); COMP_CWORD={count}; _moefold; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script("bash", capsys) + ask], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.split() == expected
