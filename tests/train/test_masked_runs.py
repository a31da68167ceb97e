"""Masks of trained tokens: the loss is the sum over trained tokens divided once by their number, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moefold.config.rules import check_config
from moefold.config.run import Config, ParallelConfig
from moefold.data.corpus import Corpus
from moefold.data.sequences import RowSequences
from moefold.layout.axes import World, create_world, single_rank_world
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

SEQ = 16
BATCH = 8
RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "sequences over all ranks": {"ep": 2},
    "ring over cp, words over tp": {"cp": 2, "tp": 2, "context": "ring"},
    "a pipeline": {"pp": 2},
}


def corpus(trains_nothing: bool = False) -> Corpus:
    """Random tokens, half of them trained. The first two sequences of the run, all that the first of four ranks has,
    have no trained token; of the third, the last quarter is trained, which is one part of context parallelism."""
    chance = np.random.default_rng(6)
    tokens = chance.integers(0, 256, 60 * SEQ).astype(np.uint8)
    mask = chance.random(len(tokens)) < 0.5
    windows = RowSequences(tokens, SEQ, 1)
    first, second, third = (windows.start_of_sequence(number) + 1 for number in range(3))
    mask[first : first + SEQ] = mask[second : second + SEQ] = False
    mask[third : third + SEQ] = np.arange(SEQ) >= SEQ * 3 // 4
    if trains_nothing:
        mask[:] = False
    return Corpus(tokens, tokens, train_mask=mask, held_out_mask=mask)


def masked(world: int, **parallel: Any) -> Config:
    config = PRESETS["tiny"]()
    moe = with_moe_keys(config.model.moe, aux_loss=0.5, z_loss=0.2)
    config = replace(
        config,
        model=replace(config.model, moe=moe),
        parallel=ParallelConfig(**parallel),
        train=replace(config.train, precision="fp64"),
    )
    config = shrink_config(config, world)
    train = replace(config.train, global_batch=BATCH, seed=1)
    return check_config(replace(config, data=replace(config.data, seq_len=SEQ), train=train), world)


def one_step(world: World, configs: Sequence[Config]) -> list[list[TraceEntry]]:
    """Loss, tokens of each expert and gradients of the first step, for each configuration."""
    found: list[list[TraceEntry]] = []
    for config in configs:
        here = create_world(world.rank, world.size, world.device, config.parallel)
        run = assemble_run(config, here, Path("."), corpus())
        report = train_step(run, run.loader.next_batch())
        counts = expert_token_counts(report.loads, "")
        found.append([scalar_entry("loss", report.loss), *counts, *local_gradients(run, "")])
    return found


def plain_step(config: Config) -> list[TraceEntry]:
    """The same by its formula, from logits and the mask itself: every token is routed, attended to and balanced, and
    the trained ones have a loss."""
    world = single_rank_world()
    config = single_rank_config(config)
    data = corpus()
    assert data.train_mask is not None
    starts = [RowSequences(data.train, SEQ, config.train.seed).start_of_sequence(n) for n in range(BATCH)]
    rows = torch.tensor(np.stack([data.train[start : start + SEQ + 1] for start in starts])).long()
    trained = torch.tensor(np.stack([data.train_mask[start + 1 : start + SEQ + 1] for start in starts]))
    assert not trained[:2].any()
    model = build_model(config, world, choose_kernels(config, world))
    tokens = rows[:, :-1]
    model.eval()  # routers count nothing
    chosen = model.logits(tokens).log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    loss = -chosen[trained].sum() / trained.sum()
    model.train()
    balance = model(tokens, tokens).balance
    (loss + balance / tokens.numel()).backward()
    trace = [scalar_entry("loss", loss.item()), *expert_token_counts(model.balance(), "")]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        trace.append(TraceEntry(f"gradient {name}", (0,) * parameter.ndim, parameter.grad))
    return trace


def test_a_masked_step_is_its_formula():
    config = masked(1)
    (found,) = one_step(single_rank_world(), [config])
    assert first_mismatch(plain_step(config), [found], 1e-12) is None


def test_a_masked_step_on_any_layout_is_its_formula():
    configs = {name: masked(RANKS, **settings) for name, settings in LAYOUTS.items()}
    by_rank = run_ranks(one_step, RANKS, list(configs.values()))
    for number, (name, config) in enumerate(configs.items()):
        traces = [found[number] for found in by_rank]
        assert first_mismatch(plain_step(config), traces, 1e-12) is None, name


def test_a_batch_without_trained_tokens_moves_no_weight():
    config = masked(1)
    config = replace(config, optim=replace(config.optim, weight_decay=0.0))
    run = assemble_run(config, single_rank_world(), Path("."), corpus(trains_nothing=True))
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    report = train_step(run, run.loader.next_batch())
    assert (report.loss, report.tokens, report.grad_norm, report.is_finite) == (0.0, 0, 0.0, True)
    assert all(torch.equal(weight, before[name]) for name, weight in run.model.named_parameters())
