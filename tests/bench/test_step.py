"""`moefold bench step`: the report and profile where there is no GPU, its configurations, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moefold.bench.step import STEP_GOALS, step_bench_config
from moefold.cli.bench import run_command
from moefold.config.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full models would run")
def test_every_timing_is_printed_as_it_is_measured_and_a_profile_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moefold.bench.step.installed_version", lambda _: None)  # transformers takes long in places
    assert run_command(["step", "--json", "--steps", "1", "--model", "qwen3-30b-a3b", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    (row,) = report["results"]
    progress = [line.split(":")[0] for line in printed.err.splitlines() if "tokens/s" in line]
    assert progress == ["qwen3-30b-a3b, ours"], "as it is measured"
    assert json.loads((tmp_path / "step.json").read_text()) == report
    assert row["ours"]["tokens_per_s"] > 0
    assert "attend core" in (tmp_path / "qwen3-30b-a3b" / "profile.txt").read_text()
    assert (tmp_path / "qwen3-30b-a3b" / "trace.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full models would run")
def test_recipes_are_timed_with_the_options_of_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moefold.bench.step.installed_version", lambda _: None)
    words = ["step", "--steps", "1", "--model", "qwen3-30b-a3b", "--json"]
    assert run_command([*words, "--recipe", "fp8_tensor", "--storage", "fp8", "--scaling", "delayed"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["precision"] == {"scaling": "delayed", "storage": "fp8"}
    (row,) = report["results"]
    assert row["fp8_tensor"]["tokens_per_s"] > 0
    assert row["fp8_tensor"]["last_loss"] != row["ours"]["last_loss"]
    with pytest.raises(UserError, match="storage"):
        run_command([*words, "--recipe", "fp8_row", "--storage", "fp8"])


@pytest.mark.parametrize("name", STEP_GOALS)
def test_the_models_are_the_presets_at_four_sequences_of_4096(name: str):
    config = step_bench_config(name, "cuda")
    assert (config.train.global_batch, config.train.micro_batch, config.data.seq_len) == (4, 4, 4096)
    assert config.model.layers == STEP_GOALS[name].layers
    assert not config.model.moe.router.force_balance
    assert (config.optim.main, config.optim.moments) == ("split", "bf16"), "fp32 main weights, split"


def test_an_unknown_model_and_no_steps_are_refused():
    with pytest.raises(UserError, match="olmoe-1b-7b"):
        run_command(["step", "--model", "olmoe-1b"])
    with pytest.raises(UserError, match="--steps 0 is not legal"):
        run_command(["step", "--steps", "0"])
