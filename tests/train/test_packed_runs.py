"""Packing changes nothing: a step on packed documents is the step on each document by itself, on any layout."""

from __future__ import annotations

import itertools
import random
import re
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
from moefold.model.attention.context_parallel import CONTEXT_MECHANISMS
from moefold.optim.qk_clip import watch_of
from moefold.presets.zoo import PRESETS
from moefold.schedule.schedule_catalog import SCHEDULES as CATALOG
from moefold.train.assemble import Run, assemble_run, build_model, choose_kernels
from moefold.train.loop import introduction_lines
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

SEQ = 32
RANKS = 8
COMBINATIONS = 40
LATENT = AttentionConfig(kind="mla", heads=4, kv_heads=4, rope_dim=4, q_rank=12, kv_rank=16, value_dim=6)
DEGREES = [  # pp, cp, tp, ep
    (1, 2, 1, 1),
    (1, 2, 1, 8),
    (1, 2, 2, 1),
    (1, 4, 1, 1),
    (1, 4, 1, 8),
    (1, 4, 2, 1),
    (1, 8, 1, 1),
    (2, 2, 1, 1),
    (2, 2, 2, 4),
    (2, 4, 1, 1),
]
FORMS: list[dict[str, Any]] = [{}, {"window": 5}, {"sinks": True}, {"window": 7, "sinks": True}, {"kind": "mla"}]
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb_h1")


def corpus(has_masks: bool = False) -> Corpus:
    """Documents that fill no bin to its end, some of them empty; test_packed_sequences.py has longer ones. With masks
    every second token is trained, and nothing of every second document."""
    chance = np.random.default_rng(4)
    lengths = chance.choice([1, 6, 12, 18], size=300, p=[0.1, 0.5, 0.35, 0.05])
    tokens = chance.integers(0, 256, lengths.sum()).astype(np.uint8)
    starts = np.cumsum([0, *lengths[:-1]])
    if not has_masks:
        return Corpus(tokens, tokens, starts, starts)
    document = np.repeat(np.arange(len(lengths)), lengths)
    mask = (chance.random(len(tokens)) < 0.5) & (document % 2 > 0)
    return Corpus(tokens, tokens, starts, starts, (), mask, mask)


def packed(
    world: int,
    form: dict[str, Any] | None = None,
    mtp: int = 0,
    over: str = "sequence",
    packing: str = "best_fit",
    schedule: str = "1f1b",
    **parallel: Any,
) -> Config:
    """A small model with balance losses of every kind."""
    config = PRESETS["tiny"]()
    moe = with_moe_keys(config.model.moe, aux_loss=0.5, z_loss=0.2, aux_over=over)
    form = form or {}
    attention = LATENT if form.get("kind") == "mla" else replace(config.model.attention, **form)
    config = replace(
        config,
        model=replace(config.model, moe=moe, mtp=mtp, attention=attention),
        parallel=ParallelConfig(**parallel),
        pipeline=replace(config.pipeline, schedule=schedule, vpp=CATALOG[schedule].least_vpp),
        train=replace(config.train, precision="fp64"),
    )
    config = shrink_config(config, world)
    attention = replace(config.model.attention, window=form.get("window", 0))
    data = replace(config.data, seq_len=SEQ, attend="document", packing=packing)
    return check_config(replace(config, model=replace(config.model, attention=attention), data=data), world)


def combinations() -> list[Config]:
    """Every context mechanism on every degree, with all else drawn at random."""
    chance = random.Random(7)
    found: list[Config] = []
    for (pp, cp, tp, ep), context in itertools.product(DEGREES, CONTEXT_MECHANISMS):
        config = packed(
            RANKS,
            chance.choice(FORMS),
            mtp=chance.choice([0, 0, 0, 1, 2]),
            over=chance.choice(["sequence", "sequence", "previous_batch"]),
            packing=chance.choice(["first_fit", "best_fit"]),
            schedule=chance.choice(SCHEDULES) if pp > 1 else "1f1b",
            pp=pp,
            cp=cp,
            tp=tp,
            context=context,
            ep=ep,
        )
        fewest = pp * RANKS // (pp * cp * tp)  # a microbatch for each stage
        found.append(check_config(replace(config, train=replace(config.train, global_batch=fewest)), RANKS))
    return found


def one_step(world: World, configs: Sequence[Config], has_masks: bool = False) -> list[list[TraceEntry]]:
    """Loss, tokens of each expert and gradients of the first step, for each configuration. Ranks 0-3 and 4-7 are taken
    for two nodes."""
    found: list[list[TraceEntry]] = []
    for degrees, some in itertools.groupby(configs, lambda each: replace(each.parallel, context="ring")):
        here = create_world(world.rank, world.size, world.device, degrees, node_size=4)
        for config in some:
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
    samples = samples_of(run.loader.next_batch())
    model = build_model(run.config, run.world, choose_kernels(run.config, run.world))
    losses = [model(tokens, labels) for tokens, labels in samples]
    counts_1M = torch.stack([model.loss_counts(labels) for _, labels in samples]).sum(0)
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
    config = packed(1, mtp=mtp, over=over)
    (found,) = one_step(single_rank_world(), [config], has_masks)
    assert first_mismatch(one_by_one(config, has_masks), [found], 1e-12) is None


@pytest.mark.parametrize("has_masks", [False, True])
def test_batches_have_padding_several_documents_and_some_without_a_label(has_masks: bool):
    batch = assemble_run(packed(1), single_rank_world(), Path("."), corpus(has_masks)).loader.next_batch()
    assert batch.filled_B is not None
    assert (batch.filled_B < SEQ).any(), "there is padding"
    samples = samples_of(batch)
    assert len(samples) >= 2 * len(batch.tokens_BS)
    assert has_masks == any((labels == IGNORE_INDEX).all().item() for _, labels in samples)


def test_logits_of_padding_are_none_of_the_largest():
    """Padding has tokens 0 alone, which no document has here, and whose logits are by far the largest."""
    config = packed(1, {"qk_norm": "none"})
    config = replace(config, optim=replace(config.optim, qk_clip=1.0))
    full = corpus()
    tokens = np.maximum(full.train, 1)
    text = Corpus(tokens, tokens, full.train_starts, full.train_starts)
    run = assemble_run(config, single_rank_world(), Path("."), text)
    with torch.no_grad():
        padding_D = run.model.get_parameter("embedding.weight")[0]
        for name in ("query", "key"):
            weight_HXD = run.model.get_parameter(f"blocks.0.attention.{name}.weight")
            weight_HXD.add_(50 * padding_D)
        batch = run.loader.next_batch()
        run.model(batch.tokens_BS, batch.labels_BS, begins_BS=batch.begins_BS, filled_B=batch.filled_B)
        found = largest_logits(run)
        for sample in samples_of(batch):
            run.model(*sample)
        expected = largest_logits(run)
        run.model(torch.zeros_like(batch.tokens_BS), batch.labels_BS)
        of_padding = largest_logits(run)
    assert (expected > 0).all()
    assert (of_padding[0] > 2 * expected[0]).all()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def largest_logits(run: Run) -> torch.Tensor:
    """Of each layer's heads since they were taken last."""
    return torch.stack([watch_of(layer).take() for layer in run.qk_clip.layers.values()])


def test_samples_that_are_cut_are_told_at_the_start():
    config = packed(1)
    for seq_len, expected in ((5, ", .* of them before the first trained token; set data.seq_len to 17"), (17, None)):
        data = replace(config.data, seq_len=seq_len)
        run = assemble_run(replace(config, data=data), single_rank_world(), Path("."), corpus(has_masks=True))
        lines = [line for line in introduction_lines(run) if "cuts" in line]
        lengths = np.diff(corpus().train_starts, append=len(corpus().train))
        cut = int((lengths > seq_len + 1).sum())
        assert len(lines) == bool(cut)
        if expected:
            assert re.search(f"data.seq_len = 5 cuts {cut} of {len(lengths)} samples{expected}", lines[0])


@pytest.mark.parametrize("chunk", range(0, COMBINATIONS, 10))
def test_a_packed_step_with_masks_on_any_layout_is_the_step_on_each_document_by_itself(chunk: int):
    configs = combinations()[chunk : chunk + 10]
    by_rank = run_ranks(one_step, RANKS, configs, True)
    for number, config in enumerate(configs):
        traces = [found[number] for found in by_rank]
        difference = first_mismatch(one_by_one(config, True), traces, 1e-12)
        assert difference is None, f"{config.parallel}, {config.model}: {difference}"


COUNTED = [  # pp, cp, tp, ep, schedule
    (2, 2, 1, 4, "interleaved"),
    (4, 1, 2, 1, "zb_h1"),
]


def counted(world: int, **settings: Any) -> Config:
    """A run whose steps have 20 samples each."""
    config = packed(world, **settings)
    train = replace(config.train, global_batch=20, micro_batch=1)
    return check_config(replace(config, train=train, data=replace(config.data, batch_of="samples")), world)


def two_steps(world: World, configs: Sequence[Config]) -> list[tuple[list[TraceEntry], list[float], list[int]]]:
    """Loss, loads and gradients of the first step; losses and microbatches of both."""
    found: list[tuple[list[TraceEntry], list[float], list[int]]] = []
    for config in configs:
        here = create_world(world.rank, world.size, world.device, config.parallel) if world.size > 1 else world
        run = assemble_run(config, here, Path("."), corpus(has_masks=True))
        trace: list[TraceEntry] = []
        losses: list[float] = []
        microbatches: list[int] = []
        for _ in range(2):
            batch = run.loader.next_batch()
            report = train_step(run, batch)
            counts = expert_token_counts(report.loads, "")
            trace = trace or [scalar_entry("loss", report.loss), *counts, *local_gradients(run, "")]
            losses.append(report.loss)
            microbatches.append(len(batch.tokens_BS))
        found.append((trace, losses, microbatches))
    return found


@pytest.mark.extended
def test_a_step_of_counted_samples_has_as_many_microbatches_as_they_fill_and_equals_each_by_itself_on_any_layout():
    configs: list[Config] = []
    for number, (pp, cp, tp, ep, schedule) in enumerate(COUNTED):
        fit = ("first_fit", "best_fit")[number % 2]
        layout = {"pp": pp, "cp": cp, "tp": tp, "ep": ep}
        configs.append(counted(RANKS, mtp=number % 2, packing=fit, schedule=schedule, **layout))
    by_rank = run_ranks(two_steps, RANKS, configs)
    for number, config in enumerate(configs):
        traces, losses, microbatches = zip(*(found[number] for found in by_rank), strict=True)
        difference = first_mismatch(one_by_one(config, True), traces, 1e-12)
        assert difference is None, f"{config.parallel}: {difference}"
        ((_, expected, bins),) = two_steps(single_rank_world(), [single_rank_config(config)])
        assert losses[0] == pytest.approx(expected, rel=1e-9), "two steps are those of one rank"
        dp = RANKS // (config.parallel.pp * config.parallel.cp * config.parallel.tp)
        assert list(microbatches[0]) == [-(-count // dp) for count in bins]
    assert len(set(bins)) > 1, "microbatches differ from step to step"


def test_the_layouts_have_every_mechanism_size_schedule_and_form():
    configs = combinations()
    assert len(configs) == COMBINATIONS
    pairs = {(each.parallel.context, each.parallel.cp) for each in configs}
    assert pairs == {(context, cp) for context in CONTEXT_MECHANISMS for cp in (2, 4, 8)}
    assert {each.pipeline.schedule for each in configs if each.parallel.pp > 1} == set(SCHEDULES)
    assert {each.model.mtp for each in configs} == {0, 1, 2}
    forms = {(each.model.attention.kind, each.model.attention.window, each.model.attention.sinks) for each in configs}
    assert len(forms) == len(FORMS)
