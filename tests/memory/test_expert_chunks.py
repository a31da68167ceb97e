"""Experts in chunks of rows: results and gradients of the whole, in the memory of one chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.config.run import MemoryConfig
from moefold.memory.choose import attach_configured_policies
from moefold.presets.recipe import resolve_recipe
from tests.plan.layer.test_moefold_layers import kept_by_steps, real

CHUNK = 128  # of 512 rows: 2 sequences of 128 tokens, 2 experts each
MECHANISMS = {
    "plain": "",
    "gate behind the experts": "--model.moe.gate=output",
    "latent experts": "--model.moe.latent=48",
    "biases": "--model.moe.biases=true --model.moe.activation=clamped_swiglu",
    "capacity": "--model.moe.capacity.factor=1.5 --model.moe.capacity.pad=true",
    "recomputed": "--memory.recompute=layer",
    "offloaded": "--memory.offload=layer --memory.offload_least=64",
}


def gradients(words: str, chunk: int) -> tuple[dict[str, torch.Tensor], int]:
    config = resolve_recipe("tiny", [*words.split(), "--data.seq_len=128", "--train.micro_batch=2", "--model.layers=2"])
    config = replace(config, memory=replace(config.memory, expert_chunk=chunk))
    model = real(config, "fp64", "cpu").double()
    attach_configured_policies(model, config)
    tokens, labels = torch.randint(256, (2, 2, 128), generator=torch.Generator().manual_seed(1))
    losses = model(tokens, labels)
    (losses.cross_entropy + losses.balance).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found["loss"] = losses.cross_entropy.detach()
    kept = kept_by_steps(model, config)["experts"]
    return found, kept


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_chunks_give_the_gradients_of_the_whole(mechanism: str):
    whole, kept = gradients(MECHANISMS[mechanism], 0)
    chunked, kept_of_chunks = gradients(MECHANISMS[mechanism], CHUNK)
    assert set(whole) == set(chunked)
    for name, gradient in whole.items():
        error = (gradient - chunked[name]).abs().max()
        assert error <= 1e-12 * gradient.abs().max(), name
    if mechanism not in ("recomputed", "offloaded"):
        assert kept_of_chunks < kept / 4


def test_few_rows_are_computed_at_once():
    assert MemoryConfig().expert_chunk == 0
    whole, kept = gradients("", 0)
    same, kept_of_same = gradients("", 4 * CHUNK)
    assert kept == kept_of_same
    for name, gradient in whole.items():
        assert torch.equal(gradient, same[name])
