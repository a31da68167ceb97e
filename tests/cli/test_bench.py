"""`moefold bench`: what it prints where there is no GPU, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from moefold.bench.curves import curves_as_svg, loss_distances
from moefold.bench.layer import LAYER_SHAPES
from moefold.bench.step import STEP_GOALS, step_bench_config
from moefold.cli.bench import run_command
from moefold.config.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full layers would run")
def test_bench_layer_prints_json_with_the_machine_and_every_figure(capsys: pytest.CaptureFixture[str]):
    assert run_command(["layer", "--json", "--repeat", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"date", "card", "versions", "results"} == set(report)
    (row,) = report["results"]
    for who in ("ours", "ours_zipf"):
        assert row[who]["milliseconds"] > 0
        assert row[who]["tflops"] > 0


def test_the_operations_of_a_layer_are_those_of_its_six_products():
    layer = LAYER_SHAPES["qwen3-30b-a3b"]
    rows = layer.tokens * layer.top_k
    up, down = 2 * rows * layer.hidden * 2 * layer.ffn, 2 * rows * layer.hidden * layer.ffn
    assert layer.flops_per_step == 3 * (up + down)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full models would run")
def test_bench_step_tells_what_it_measured_and_leaves_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moefold.bench.step.installed_version", lambda _: None)  # transformers takes long in places
    assert run_command(["step", "--json", "--steps", "1", "--model", "qwen3-30b-a3b", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    (row,) = report["results"]
    told = [line.split(":")[0] for line in printed.err.splitlines() if "tokens/s" in line]
    assert told == ["qwen3-30b-a3b, ours"], "as it is measured"
    assert json.loads((tmp_path / "step.json").read_text()) == report
    assert row["ours"]["tokens_per_s"] > 0
    assert "attend core" in (tmp_path / "qwen3-30b-a3b" / "profile.txt").read_text()
    assert (tmp_path / "qwen3-30b-a3b" / "trace.json").exists()


@pytest.mark.parametrize("name", STEP_GOALS)
def test_the_models_of_bench_step_are_the_presets_at_four_sequences_of_4096(name: str):
    config = step_bench_config(name, "cuda")
    assert (config.train.global_batch, config.train.micro_batch, config.data.seq_len) == (4, 4, 4096)
    assert config.model.layers == STEP_GOALS[name].layers
    assert not config.model.moe.router.force_balance
    assert (config.optim.main, config.optim.moments) == ("split", "bf16"), "fp32 main weights, in halves"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the larger model would run")
def test_bench_curves_compares_fast_kernels_with_references_on_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["curves", "--json", "--steps", "2", "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    fast, reference, exact = (report["losses"][way] for way in ("fast", "reference", "exact"))
    assert len(fast) == len(reference) == len(exact) == 2
    assert fast != exact, "bf16 rounds"
    assert report["summary"]["fast"]["at_most"] < 0.05
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")


def test_a_curve_strays_by_its_distance_from_fp32():
    found = loss_distances({"fast": [1.0, 2.0], "reference": [1.5, 1.0], "exact": [1.0, 1.5]})
    assert found["fast"] == {"last": 2.0, "strays": 0.25, "at_most": 0.5}
    assert found["exact"]["strays"] == 0.0
    lines = curves_as_svg({"losses": {"fast": [1.0, 2.0], "reference": [1.5, 1.0], "exact": [1.0, 1.5]}})
    assert lines.count("<polyline") == 5, "three losses, and two distances"


def test_an_unknown_model_and_no_steps_are_refused():
    with pytest.raises(UserError, match="olmoe-1b-7b"):
        run_command(["step", "--model", "olmoe-1b"])
    with pytest.raises(UserError, match="--steps 0 is not legal"):
        run_command(["step", "--steps", "0"])


def test_an_unknown_layer_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="olmoe-7b"):
        run_command(["layer", "--layer", "olmo-7b"])
