"""Which words are a command's own and which override the configuration; the end of --help."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moefold.cli.generate import GenerateOptions
from moefold.cli.main import run_command_line
from moefold.cli.train import TrainOptions
from moefold.presets.command_options import split_overrides


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("tiny --observe.profile", ["--observe.profile", "true"]),
        ("tiny --observe.profile --train.steps 5", ["--observe.profile", "true", "--train.steps", "5"]),
        ("tiny --observe.profile false", ["--observe.profile", "false"]),
        ("tiny --observe.profile=false", ["--observe.profile=false"]),
        ("tiny --observe.profile train.steps=5", ["--observe.profile", "true", "--train.steps=5"]),
        ("tiny --train.steps", ["--train.steps"]),  # not a switch: refused later, for want of a value
        ("tiny --train.steps --nproc", ["--train.steps", "--nproc"]),
    ],
)
def test_a_switch_may_be_said_without_a_value(words: str, overrides: list[str]):
    assert split_overrides(TrainOptions, words.split()) == (["tiny"], overrides)


@pytest.mark.parametrize(
    ("words", "mine", "overrides"),
    [
        ("tiny train.steps=5", ["tiny"], ["--train.steps=5"]),
        ("train.steps=5 tiny", ["tiny"], ["--train.steps=5"]),
        ("nproc=2 tiny", ["--nproc=2", "tiny"], []),  # an option of the command, likewise
        ("--out lr=1 tiny", ["--out", "lr=1", "tiny"], []),  # the value of an option
        ("--from_hf a=b", ["--from_hf", "a=b"], []),
        ("--data.files a=b", [], ["--data.files", "a=b"]),  # the value of a key
        ("runs/lr=1/config.yaml", ["runs/lr=1/config.yaml"], []),  # a path
        ("--out --train.steps=5", ["--out"], ["--train.steps=5"]),
    ],
)
def test_a_key_may_be_said_without_dashes(words: str, mine: list[str], overrides: list[str]):
    assert split_overrides(TrainOptions, words.split()) == (mine, overrides)


@pytest.mark.parametrize(
    ("words", "mine", "overrides"),
    [
        ("run --prompt x=1 y=2", ["run", "--prompt", "x=1", "y=2"], []),  # prompts, not keys
        ("run parallel.ep=2 --tokens 5", ["run", "--tokens", "5"], ["--parallel.ep=2"]),
        ("run --parallel.ep 2 --prompt a", ["run", "--prompt", "a"], ["--parallel.ep", "2"]),
    ],
)
def test_where_keys_of_one_section_are_taken_other_words_with_a_sign_are_values(
    words: str, mine: list[str], overrides: list[str]
):
    assert split_overrides(GenerateOptions, words.split(), "parallel") == (mine, overrides)


@pytest.mark.parametrize("words", ["doctor parity", "doctor", "train"])
def test_help_ends_without_a_word_where_its_reader_has_ended(words: str):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "moefold", *words.split(), "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refused_word_is_repeated_with_its_control_characters_escaped(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run_command_line(["ckpt", "\x1b[2J"])
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "[2J" in said.err
