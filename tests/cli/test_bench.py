"""`moefold bench`: what it prints where there is no GPU, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from moefold.cli.bench import run
from moefold.cli.bench_layer import LAYERS
from moefold.config.refused import Refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full layers would run")
def test_bench_layer_prints_json_with_the_machine_and_every_figure(capsys: pytest.CaptureFixture[str]):
    assert run(["layer", "--json", "--repeat", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"date", "card", "versions", "results"} == set(report)
    (row,) = report["results"]
    for who in ("ours", "ours_zipf"):
        assert row[who]["milliseconds"] > 0
        assert row[who]["tflops"] > 0


def test_the_operations_of_a_layer_are_those_of_its_six_products():
    layer = LAYERS["qwen3-30b-a3b"]
    rows = layer.tokens * layer.top_k
    up, down = 2 * rows * layer.hidden * 2 * layer.ffn, 2 * rows * layer.hidden * layer.ffn
    assert layer.operations == 3 * (up + down)


def test_an_unknown_layer_is_refused_with_the_nearest():
    with pytest.raises(Refused, match="olmoe-7b"):
        run(["layer", "--layer", "olmo-7b"])
