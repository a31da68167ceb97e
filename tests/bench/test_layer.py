"""`moefold bench layer`: the report where there is no GPU, and the refusal of unknown layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moefold.bench.layer import LAYER_SHAPES
from moefold.cli.bench import run_command
from moefold.config.errors import UserError
from moefold.precision.operand_history import OperandHistory


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full layers would run")
def test_json_has_the_machine_and_every_figure(capsys: pytest.CaptureFixture[str]):
    assert run_command(["layer", "--json", "--repeat", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"date", "card", "versions", "precision", "results"} == set(report)
    (row,) = report["results"]
    for contender in ("ours", "ours_zipf"):
        assert row[contender]["milliseconds"] > 0
        assert row[contender]["tflops"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full layers would run")
def test_recipes_are_timed_with_the_options_of_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moefold.bench.layer.installed_version", lambda _: None)  # transformers takes long
    delayed: set[bool] = set()
    monkeypatch.setattr(OperandHistory, "scales", noting_calls(OperandHistory.scales, delayed))
    words = ["layer", "--repeat", "1", "--recipe", "fp8_tensor", "--scaling", "delayed", "--accumulate", "fast"]
    assert run_command(words) == 0
    assert "precision recipes, scaling delayed, accumulate fast" in capsys.readouterr().out
    assert delayed == {True}, "scales come from the history, as in all steps of a run but the first"
    with pytest.raises(UserError, match="scaling"):
        run_command(["layer", "--repeat", "1", "--recipe", "fp8_block", "--scaling", "delayed"])


def noting_calls(function: Callable[..., Any], seen: set[bool]) -> Callable[..., Any]:
    def noted(*inputs: Any) -> Any:
        seen.add(True)
        return function(*inputs)

    return noted


def test_the_operations_of_a_layer_are_those_of_its_six_products():
    layer = LAYER_SHAPES["qwen3-30b-a3b"]
    rows = layer.tokens * layer.top_k
    up, down = 2 * rows * layer.hidden * 2 * layer.ffn, 2 * rows * layer.hidden * layer.ffn
    assert layer.flops_per_step == 3 * (up + down)


def test_an_unknown_layer_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="olmoe-7b"):
        run_command(["layer", "--layer", "olmo-7b"])
