"""`moefold bench packing` where there is no GPU: its rows, and the share of pairs that real borders hide."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from moefold.bench import packing
from moefold.bench.options import PackingOptions
from moefold.bench.packing import document_lengths, removed_share
from moefold.bench.step import step_bench_config
from moefold.cli.bench import run_command
from moefold.config.errors import UserError
from moefold.kernels.attention.attention import attention_mask
from moefold.train.assemble import Run


def test_the_hidden_share_is_that_of_the_masks():
    begins = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5], [0, 0, 0, 0, 0, 0, 0, 7]])
    seen = attention_mask(8, 8, 0, 0, begins.device, begins).sum().item()
    assert removed_share(begins) == pytest.approx(1 - seen / (2 * 36))
    assert removed_share(None) == 0


def test_documents_have_700_tokens_of_4096_on_average():
    lengths = document_lengths(step_bench_config("olmoe-1b-7b", "cuda"), 10**7)
    assert 620 < lengths.mean() < 720, "some are cut"
    assert lengths.max() == 4096


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full model would run")
def test_whole_packed_and_padded_steps_are_timed(capsys: pytest.CaptureFixture[str]):
    assert run_command(["packing", "--json", "--steps", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    whole, packed, padded = report["results"]
    assert [row["way"] for row in report["results"]] == ["whole", "packed", "padded"]
    assert padded["tokens"] < packed["tokens"] <= whole["tokens"]
    assert whole["removed"] == padded["removed"] == 0 < packed["removed"] < 1
    saved = 0.7 * packed["removed"] * report["attention"]
    assert report["goal"] == pytest.approx(packed["tokens"] / (whole["milliseconds"] - saved) * 1e3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full model would run")
def test_memory_is_given_back_behind_each_run_and_not_while_the_run_has_it(monkeypatch: pytest.MonkeyPatch):
    assemble, free = packing.assemble_run, packing.free_device_memory
    models, held = list[weakref.ref[nn.Module]](), list[int]()

    def noting_models(*inputs: Any) -> Run:
        run = assemble(*inputs)
        models.append(weakref.ref(run.model))
        return run

    def noting_held(device: str) -> None:
        free(device)
        held.append(sum(model() is not None for model in models))

    monkeypatch.setattr(packing, "assemble_run", noting_models)
    monkeypatch.setattr(packing, "free_device_memory", noting_held)
    packing.packing_report(PackingOptions(steps=1))
    assert held == [0, 0, 0]


def test_an_unknown_model_is_refused():
    with pytest.raises(UserError, match="olmoe-1b-7b"):
        run_command(["packing", "--model", "olmoe-1b"])
