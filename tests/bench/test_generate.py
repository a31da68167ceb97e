"""`moefold bench generate`: the report where there is no GPU, the bytes of a step, and refusals."""

from __future__ import annotations

import json

import pytest
import torch

import moefold
from moefold.bench.generate import bytes_of, bytes_read, mean_step, noted_choices
from moefold.cli.bench import run_command
from moefold.config.errors import UserError
from moefold.generate.next_logits import model_logits


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full model would run")
def test_every_batch_is_timed_beside_transformers(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    options = ["--json", "--batch", "2", "--prompt", "5", "--tokens", "20", "--theirs", "dynamic"]
    assert run_command(["generate", *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert list(row["milliseconds"]) == ["moefold", "eager", "dynamic"]
    assert all(value > 0 for value in row["milliseconds"].values())
    assert row["share"] > 0


def test_a_step_reads_each_chosen_expert_once_and_what_is_kept():
    model = moefold.Model("tiny", layers=2, seq_len=16).eval()
    source = model_logits(model.transformer)
    chosen: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        source.begin([[1, 2, 3]], most=8)
        with noted_choices(model.transformer, chosen):
            source.follow([4])
    moe, attention = model.config.model.moe, model.config.model.attention
    assert {layer: ids.shape for layer, ids in chosen.items()} == {0: (1, moe.top_k), 1: (1, moe.top_k)}
    experts = sum(bytes_of(block.moe.experts) for block in model.transformer.blocks)
    kept = 2 * 4 * 2 * attention.kv_heads * attention.head_dim * 4
    rest = bytes_of(model) - experts
    if not model.config.model.tied_head:
        rest -= bytes_of(model.transformer.embedding)
    expected = rest + experts * moe.top_k / moe.experts + kept
    assert bytes_read(model.transformer, source, chosen) == pytest.approx(expected)


def test_the_first_tokens_are_not_timed():
    moments = [0.0] * 9 + [1.0, 1.5, 3.0]
    assert mean_step(moments) == 1000.0


def test_too_few_tokens_and_unknown_models_are_refused():
    with pytest.raises(UserError, match="--tokens 3 is not legal"):
        run_command(["generate", "--tokens", "3"])
    with pytest.raises(UserError, match="olmoe-1b-7b"):
        run_command(["generate", "--device", "cpu", "--model", "olmoe"])
