"""moefold.Model: logits, loss and balance losses of a whole model in a torch loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import moefold
from moefold.config.errors import UserError
from moefold.presets.recipe import resolve_recipe


def test_a_model_gives_logits_a_loss_or_both():
    model = moefold.Model("olmoe-1b-7b-tiny", layers=1)
    tokens = torch.randint(256, (2, 17))
    ids, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, 3] = -100
    both = model(ids, labels, logits=True)
    expected = F.cross_entropy(both.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(both.loss, expected)
    assert model(ids, labels).logits is None
    assert model(ids).loss is None
    assert torch.equal(model(ids).logits, both.logits)
    for words in ({"stash": "pages"}, {"offload": ("expert_weights",)}):
        config = resolve_recipe("tiny", ["--lora.rank=4", "--model.moe.balance.bias_rate=0"])
        memory = replace(config.memory, **words)
        with pytest.raises(UserError, match="is of runs"):
            moefold.Model(replace(config, memory=memory), device="cpu")
    with pytest.raises(UserError, match="labels"):
        model(ids, ids)


def test_a_model_with_multi_token_prediction_trains_and_predicts():
    model = moefold.Model("deepseek-v3-tiny", mtp=1)
    tokens = torch.randint(256, (2, 17))
    out = model(tokens[:, :-1], tokens[:, 1:])
    (out.loss + out.aux).backward()
    assert all(p.grad is not None for p in model.parameters())
