"""Inputs that nobody would write: refused in a sentence, without a traceback and without control characters."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moefold.checkpoint.format.manifest import MANIFEST_FILE, seal_manifest, unseal_manifest
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.plan.request import read_request
from tests.support.fuzz_inputs import KINDS, run_cases
from tests.support.runs import SMALL, command, corpus

LONG = "x" * 5000
LONG_PATHS = [
    ["train", f"{LONG}.yaml"],
    ["train", "tiny", "--out", LONG],
    ["train", "tiny", "--from-hf", LONG],
    ["train", "tiny", "--resume", LONG],
    ["train", "tiny", "--data.files", LONG],
    ["train", "tiny", "--data.tokenizer", f"{LONG}.json"],
    ["ckpt", "ls", LONG],
    ["ckpt", "verify", LONG],
    ["ckpt", "diff", LONG, LONG],
    ["report", LONG],
    ["convert", LONG, "out", "--to", "hf"],
    ["explain", f"{LONG}.yaml"],
    ["plan", f"{LONG}.yaml"],
    ["doctor", "hang", LONG],
]


@pytest.mark.parametrize("argv", LONG_PATHS, ids=lambda argv: " ".join(word for word in argv if LONG not in word))
def test_a_path_of_5000_characters_is_refused(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run_command_line([*argv, *(SMALL if argv[0] == "train" else [])]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moefold: ")


@pytest.mark.parametrize("argv", [["ckpt", "ls", "a\x1b[2Jb"], ["report", "\x07"], ["train", "\x1b]0;x\x07.yaml"]])
def test_control_characters_of_a_name_do_not_reach_the_terminal(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command_line(argv) == 2
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())


ODD_NUMBERS = ["0" * 11 + "8" + "9" * 9, "0" * 11 + "8" + "0" * 5000, "9" * 5000, "0", "", "0" * 5000]


@pytest.mark.parametrize("gpus", ODD_NUMBERS, ids=range(len(ODD_NUMBERS)))
def test_a_number_of_gpus_is_bounded_whatever_zeros_it_begins_with(gpus: str):
    with pytest.raises(UserError, match=r"gpus = .* is not legal"):
        read_request({"model": "tiny", "gpus": gpus})


def test_a_number_of_gpus_may_begin_with_zeros():
    assert read_request({"model": "tiny", "gpus": "008"}).gpus == 8


ODD_STATES: list[Any] = [
    {},
    {"step": "4", "consumed": 1, "config": {}},
    {"step": 2, "consumed": -1, "config": {}},
    {"step": 2, "consumed": True, "config": {}},
    {"step": 2, "consumed": 16, "config": [1]},
    {"step": 1e300, "consumed": 16, "config": {}},
]


def test_a_checkpoint_whose_state_is_nonsense_is_refused_by_resume(tmp_path: Path):
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), "--out", str(tmp_path / "a"), "--train.steps", "2"]
    code, said = command(argv, tmp_path / "log")
    assert code == 0, said
    path = (tmp_path / "a" / "checkpoints" / "latest").resolve()
    for state in ODD_STATES:
        raw = json.dumps(state).encode()
        (path / "state.json").write_bytes(raw)
        content = unseal_manifest((path / MANIFEST_FILE).read_bytes())
        content["files"]["state.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (path / MANIFEST_FILE).write_bytes(seal_manifest(content))
        for option in ("--resume", "--init-from"):
            words = [*argv[:-3], str(tmp_path / "b"), "--train.steps", "3", option, str(path)]
            code, said = command(words, tmp_path / "log")
            assert code == 2, (state, option, said)
            assert "cannot be continued: state.json has" in said, (state, option, said)
            assert "Traceback" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_odd_inputs_ends_in_an_answer_or_a_refusal(kind: str):
    """`python -m tests.support.fuzz_inputs` runs thousands of them."""
    cases = 4 if kind == "shell" else 30
    assert run_cases(kind, cases, seed=int(os.environ.get("MOEFOLD_TEST_SEED", "7"))) == []
