"""`moefold ckpt` as a person meets it: tables, JSON, and exit codes that a script can use."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.live.logical_tensors import as_tensor_part
from moefold.checkpoint.live.save import save_checkpoint
from moefold.cli.main import run_command_line
from moefold.layout.axes import single_rank_world


def put(folder: Path, experts_EX: torch.Tensor, name: str = "model.experts.down", step: int = 7) -> Path:
    stack = replace(as_tensor_part(experts_EX), stacked=True)
    tensors = {name: stack, "model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    return Path(str(save_checkpoint(folder, step, tensors, {"step": step}, RetentionPolicy(9), single_rank_world())))


@pytest.fixture
def stack() -> torch.Tensor:
    return torch.arange(24.0).view(4, 6)


def test_ls_lists_every_tensor_of_the_newest_checkpoint(stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    put(tmp_path / "checkpoints", stack, step=3)
    put(tmp_path / "checkpoints", stack)
    assert run_command_line(["ckpt", "ls", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for word in ("step 7", "model.experts.down", "float32", "4,6", "model.norm.weight", "bfloat16"):
        assert word in told
    assert run_command_line(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 7
    assert len(found["tensors"]["model.experts.down"]["experts"]) == 4
    assert found["bytes"] == 24 * 4 + 4 * 2


def test_verify_says_sound_or_names_what_is_not(stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = put(tmp_path, stack)
    assert run_command_line(["ckpt", "verify", str(path)]) == 0
    assert capsys.readouterr().out.startswith("sound: ")
    file = path / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(torch.tensor(7.0).numpy().tobytes())] ^= 1  # in expert 1
    file.write_bytes(raw)
    assert run_command_line(["ckpt", "verify", str(path)]) == 1
    assert '"model.experts.down": expert 1 has other values' in capsys.readouterr().out
    assert run_command_line(["ckpt", "verify", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ['"model.experts.down": expert 1 has other values']
    (path / "manifest.json").write_text("{}")
    assert run_command_line(["ckpt", "verify", str(path)]) == 1
    assert "manifest.json is not readable" in capsys.readouterr().out


def test_diff_names_a_dropped_expert_a_swapped_pair_and_a_renamed_key(
    stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    a = put(tmp_path / "a", stack)
    others = {
        "b": (put(tmp_path / "b", stack[[0, 1, 3]]), '"model.experts.down": expert 2 is missing'),
        "c": (put(tmp_path / "c", stack[[0, 3, 2, 1]]), '"model.experts.down": experts 1 and 3 are swapped'),
        "d": (
            put(tmp_path / "d", stack, "model.expert.down"),
            '"model.experts.down" is now called "model.expert.down"',
        ),
    }
    assert run_command_line(["ckpt", "diff", str(a), str(put(tmp_path / "same", stack))]) == 0
    assert capsys.readouterr().out.startswith("the same 2 tensors")
    for other, told in others.values():
        assert run_command_line(["ckpt", "diff", str(a), str(other)]) == 1
        assert told in capsys.readouterr().out
        assert run_command_line(["ckpt", "diff", str(a), str(other), "--json"]) == 1
        assert told in [each["text"] for each in json.loads(capsys.readouterr().out)["differences"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ls", "nowhere"], "no such folder"),
        (["verify", "."], "there is none in it"),
        (["diff", "nowhere"], "takes two checkpoints"),
        (["ls", "a", "b"], "takes one"),
        (["verify", "nosuch://x"], "cannot be reached"),
    ],
    ids=" ".join,
)
def test_what_is_no_checkpoint_is_refused(words, told, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert run_command_line(["ckpt", *words]) == 2
    assert told in capsys.readouterr().err


def test_it_answers_without_torch(stack, tmp_path: Path):
    path = put(tmp_path, stack)
    code = "import sys\nfrom moefold.cli.main import run_command_line\n"
    code += f"assert run_command_line(['ckpt', 'verify', {str(path)!r}]) == 0\n"
    done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], capture_output=True)
    assert done.returncode == 0, done.stderr
