"""Packing changes nothing: a step on packed documents is the step on each document by itself, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moefold.config.rules import check_config
from moefold.config.run import AttentionConfig, Config, ParallelConfig
from moefold.data.corpus import Corpus
from moefold.data.loader import Batch
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.labels import IGNORE_INDEX
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run, build_model, choose_kernels
from moefold.train.parity import (
    TraceEntry,
    expert_token_counts,
    first_mismatch,
    local_gradients,
    scalar_entry,
    shrink_config,
    single_rank_config,
)
from moefold.train.step import train_step
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks

SEQ = 24
RANKS = 4
LATENT = AttentionConfig(kind="mla", heads=4, kv_heads=4, rope_dim=4, q_rank=12, kv_rank=16, value_dim=6)
LAYOUTS: dict[str, dict[str, Any]] = {
    "all_gather over cp, experts over all ranks": {"cp": 2, "context": "all_gather", "ep": 4},
    "all_to_all over cp, heads over tp": {"cp": 2, "context": "all_to_all", "tp": 2},
    "a pipeline that looks ahead": {"pp": 2, "mtp": 2},
    "latent attention over cp and a pipeline": {"pp": 2, "cp": 2, "context": "all_gather", "kind": "mla"},
}


def corpus(has_masks: bool = False) -> Corpus:
    """Documents that fill no bin to its end, some of them empty; test_packed_sequences.py has longer ones. With masks
    every second token is trained, and nothing of every third document."""
    chance = np.random.default_rng(4)
    lengths = chance.choice([1, 6, 12, 18], size=300, p=[0.1, 0.5, 0.35, 0.05])
    tokens = chance.integers(0, 256, lengths.sum()).astype(np.uint8)
    starts = np.cumsum([0, *lengths[:-1]])
    if not has_masks:
        return Corpus(tokens, tokens, starts, starts)
    document = np.repeat(np.arange(len(lengths)), lengths)
    mask = (chance.random(len(tokens)) < 0.5) & (document % 3 > 0)
    return Corpus(tokens, tokens, starts, starts, (), mask, mask)


def packed(world: int, mtp: int = 0, kind: str = "gqa", over: str = "sequence", **parallel: Any) -> Config:
    """A small model with balance losses of every kind."""
    config = PRESETS["tiny"]()
    moe = with_moe_keys(config.model.moe, aux_loss=0.5, z_loss=0.2, aux_over=over)
    attention = LATENT if kind == "mla" else config.model.attention
    config = replace(
        config,
        model=replace(config.model, moe=moe, mtp=mtp, attention=attention),
        parallel=ParallelConfig(**parallel),
        train=replace(config.train, precision="fp64"),
    )
    config = shrink_config(config, world)
    data = replace(config.data, seq_len=SEQ, attend="document", packing="best_fit")
    return check_config(replace(config, data=data), world)


def one_step(world: World, configs: Sequence[Config], has_masks: bool = False) -> list[list[TraceEntry]]:
    """Loss, tokens of each expert and gradients of the first step, for each configuration."""
    found: list[list[TraceEntry]] = []
    for config in configs:
        here = create_world(world.rank, world.size, world.device, config.parallel)
        run = assemble_run(config, here, Path("."), corpus(has_masks))
        report = train_step(run, run.loader.next_batch())
        counts = expert_token_counts(report.loads, "")
        found.append([scalar_entry("loss", report.loss), *counts, *local_gradients(run, "")])
    return found


def samples_of(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens and labels of each document of a batch, without padding."""
    assert batch.begins_BS is not None
    assert batch.filled_B is not None
    found = []
    rows = zip(batch.tokens_BS, batch.labels_BS, batch.begins_BS, batch.filled_B, strict=True)
    for tokens, labels, begins, filled in rows:
        is_real = torch.arange(SEQ) < filled
        for begin in begins[is_real].unique().tolist():
            is_own = is_real & (begins == begin)
            found.append((tokens[is_own][None], labels[is_own][None]))
    return found


def one_by_one(config: Config, has_masks: bool = False) -> list[TraceEntry]:
    """The same, from documents that are each a sequence without padding, on one rank."""
    config = single_rank_config(config)
    config = replace(config, train=replace(config.train, micro_batch=1))
    run = assemble_run(config, single_rank_world(), Path("."), corpus(has_masks))
    batch = run.loader.next_batch()
    assert batch.filled_B is not None
    assert (batch.filled_B < SEQ).any(), "there is padding"
    samples = samples_of(batch)
    assert len(samples) >= 2 * len(batch.tokens_BS)
    assert has_masks == any((labels == IGNORE_INDEX).all().item() for _, labels in samples)
    model = build_model(run.config, run.world, choose_kernels(run.config, run.world))
    losses = [model(tokens, labels) for tokens, labels in samples]
    counts_1M = torch.stack([model.labelled_token_counts(labels) for _, labels in samples]).sum(0)
    own = counts_1M[0]
    cross_entropy = torch.stack([each.cross_entropy for each in losses]).sum()
    ahead_M = torch.stack([each.ahead_M for each in losses]).sum(0)
    balance = torch.stack([each.balance for each in losses]).sum()
    further = (ahead_M / counts_1M[1:]).sum() * config.model.mtp_loss / max(1, config.model.mtp)
    tokens = sum(tokens.numel() for tokens, _ in samples)
    loss = cross_entropy / own
    (loss + further + balance / tokens).backward()
    trace = [scalar_entry("loss", loss.item()), *expert_token_counts(model.balance(), "")]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        trace.append(TraceEntry(f"gradient {name}", (0,) * parameter.ndim, parameter.grad))
    return trace


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize(("over", "mtp"), [("sequence", 0), ("sequence", 2), ("previous_batch", 1)])
def test_a_packed_step_is_the_step_on_each_document_by_itself(over: str, mtp: int, has_masks: bool):
    config = packed(1, mtp, over=over)
    (found,) = one_step(single_rank_world(), [config], has_masks)
    assert first_mismatch(one_by_one(config, has_masks), [found], 1e-12) is None


def test_a_packed_step_with_masks_on_any_layout_is_the_step_on_each_document_by_itself():
    configs = {name: packed(RANKS, **settings) for name, settings in LAYOUTS.items()}
    by_rank = run_ranks(one_step, RANKS, list(configs.values()), True)
    for number, (name, config) in enumerate(configs.items()):
        traces = [found[number] for found in by_rank]
        assert first_mismatch(one_by_one(config, True), traces, 1e-12) is None, name
