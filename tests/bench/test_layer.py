"""`moefold bench layer`: the report where there is no GPU, and the refusal of unknown layers."""

from __future__ import annotations

import json

import pytest
import torch

from moefold.bench.layer import LAYER_SHAPES
from moefold.cli.bench import run_command
from moefold.config.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full layers would run")
def test_json_has_the_machine_and_every_figure(capsys: pytest.CaptureFixture[str]):
    assert run_command(["layer", "--json", "--repeat", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"date", "card", "versions", "results"} == set(report)
    (row,) = report["results"]
    for contender in ("ours", "ours_zipf"):
        assert row[contender]["milliseconds"] > 0
        assert row[contender]["tflops"] > 0


def test_the_operations_of_a_layer_are_those_of_its_six_products():
    layer = LAYER_SHAPES["qwen3-30b-a3b"]
    rows = layer.tokens * layer.top_k
    up, down = 2 * rows * layer.hidden * 2 * layer.ffn, 2 * rows * layer.hidden * layer.ffn
    assert layer.flops_per_step == 3 * (up + down)


def test_an_unknown_layer_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="olmoe-7b"):
        run_command(["layer", "--layer", "olmo-7b"])
