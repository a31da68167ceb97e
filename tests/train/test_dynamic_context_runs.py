"""Dynamic context parallelism changes nothing: a step on regrouped samples is the step on each document by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.model.attention.context_parallel import CONTEXT_MECHANISMS
from moefold.train.assemble import assemble_run
from moefold.train.parity import (
    TraceEntry,
    expert_token_counts,
    first_mismatch,
    local_gradients,
    local_weights,
    scalar_entry,
    single_rank_config,
)
from moefold.train.step import take_next_step, train_step
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks
from tests.train.test_packed_runs import RANKS, corpus, one_by_one, packed

HEADS = 8  # that all ranks can swap
KV_HEADS = 2  # which larger groups copy
COUNTED = "all_gather"  # whose bytes are compared with those of fixed sizes


class Case(NamedTuple):
    """Mechanism, degrees and the form of attention; layers that look ahead, what balance is counted over, the bins of a
    batch, and the schedule."""

    context: str
    parallel: dict[str, Any]
    form: dict[str, Any]
    mtp: int = 0
    over: str = "sequence"
    sequences: int = 4
    schedule: str = "1f1b"
    pair: bool = False


WINDOW = {"window": 5}
SINKS = {"window": 7, "sinks": True}
CASES = {
    "all_gather": Case("all_gather", {"cp": 2, "ep": 8, "dispatcher": "all_to_all"}, SINKS, mtp=1, sequences=8),
    "all_to_all": Case("all_to_all", {"cp": 4, "ep": 4, "dispatcher": "dedup"}, SINKS, over="previous_batch"),
    "hierarchical": Case("hierarchical", {"cp": 8, "ep": 8}, SINKS, sequences=2),
    "ring": Case("ring", {"cp": 4, "ep": 2, "etp": 2, "dispatcher": "dedup"}, SINKS),
    "interleaved": Case("ring", {"cp": 2, "pp": 2, "ep": 4}, WINDOW, mtp=1, schedule="interleaved", pair=True),
    "zb_h1": Case("ring", {"cp": 2, "pp": 2, "tp": 2}, {"kind": "mla"}, schedule="zb_h1"),
    "zb_v": Case("all_to_all", {"cp": 2, "pp": 2}, {}, schedule="zb_v"),
    "dualpipe_v": Case("all_gather", {"cp": 2, "pp": 2, "ep": 2, "etp": 2}, {}, schedule="dualpipe_v"),
}


class Outcome(NamedTuple):
    """The trace of a step, the sizes of this rank's groups in each microbatch, and the bytes that it
    sent for attention."""

    trace: list[TraceEntry]
    sizes: list[int]
    sent: int


def configuration(name: str) -> Config:
    case = CASES[name]
    parallel = {"context": case.context, **case.parallel}
    config = packed(RANKS, case.form, mtp=case.mtp, over=case.over, schedule=case.schedule, **parallel)
    is_latent = config.model.attention.kind == "mla"
    attention = replace(config.model.attention, heads=HEADS, kv_heads=HEADS if is_latent else KV_HEADS)
    model = replace(config.model, attention=attention)
    dynamic = replace(config.parallel, context_sizes="dynamic", context_sending=("0",))
    train = replace(config.train, global_batch=case.sequences, micro_batch=1)
    pipeline = replace(config.pipeline, pair=case.pair)
    return check_config(replace(config, model=model, parallel=dynamic, train=train, pipeline=pipeline), RANKS)


def outcomes(world: World) -> dict[str, Outcome]:
    """Of the first step, by case; `static` is one of them with fixed sizes."""
    configs = {name: configuration(name) for name in CASES}
    fixed = replace(configs[COUNTED].parallel, context_sizes="fixed", context_sending=())
    configs["static"] = replace(configs[COUNTED], parallel=fixed)
    return {name: outcome(world, config) for name, config in configs.items()}


def drawing(config: Config, ranks: int) -> Config:
    """Jitter of routers, and adapters with dropout."""
    moe = with_moe_keys(config.model.moe, jitter=0.2, bias_rate=0.0)
    lora = replace(config.lora, rank=2, dropout=0.3, targets=("*.attention.*", "*.moe.experts.*"))
    return check_config(replace(config, model=replace(config.model, moe=moe), lora=lora), ranks)


def trace_of_draws(world: World) -> list[TraceEntry]:
    """Of a step that draws by token."""
    config = drawing(configuration("ring"), RANKS)
    return outcome(world, config).trace


def outcome(world: World, config: Config) -> Outcome:
    """Ranks 0-3 and 4-7 are taken for two nodes."""
    here = create_world(world.rank, world.size, world.device, config.parallel, node_size=4)
    run = assemble_run(config, here, Path("."), corpus(has_masks=True))
    batch = run.loader.next_batch()
    with counted_bytes_sent() as counter:
        report = train_step(run, batch)
    counts = expert_token_counts(report.loads, "")
    trace = [scalar_entry("loss", report.loss), *counts, *local_gradients(run, "")]
    sizes = [part.cp_size for part in batch.parts if part.cp_size]
    sent = sum(size for (_, axis), size in counter.items() if axis == "cp")
    return Outcome(trace, sizes, sent)


@cache
def on_ranks() -> list[dict[str, Outcome]]:
    return run_ranks(outcomes, RANKS)


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_dynamic_context_is_the_step_on_each_document_by_itself(name: str):
    traces = [found[name].trace for found in on_ranks()]
    assert first_mismatch(one_by_one(configuration(name), True), traces, 1e-12) is None


def test_what_is_drawn_by_token_is_as_in_the_bins_of_fixed_sizes():
    alone = drawing(single_rank_config(configuration("ring")), 1)
    expected = outcome(single_rank_world(), alone).trace
    assert first_mismatch(expected, run_ranks(trace_of_draws, RANKS), 1e-12) is None
    quiet = replace(alone, lora=replace(alone.lora, dropout=0.0))
    assert first_mismatch(expected, [outcome(single_rank_world(), quiet).trace], 1e-12) is not None, "dropout counts"


CLIPPED = ("ring", "hierarchical")  # in blocks, and in heads that ranks swap


def clipping(name: str) -> Config:
    config = configuration(name)
    attention = replace(config.model.attention, qk_norm="none")
    model = replace(config.model, attention=attention)
    return check_config(replace(config, model=model, optim=replace(config.optim, qk_clip=0.01)), RANKS)


def clipped_by_case(world: World) -> dict[str, list[TraceEntry]]:
    return {name: clipped_weights(world, clipping(name)) for name in CLIPPED}


def clipped_weights(world: World, config: Config) -> list[TraceEntry]:
    """Queries' and keys' projections behind two steps."""
    here = world
    if world.size > 1:
        here = create_world(world.rank, world.size, world.device, config.parallel, node_size=4)
    run = assemble_run(config, here, Path("."), corpus(has_masks=True))
    for _ in range(2):
        take_next_step(run)
    run.parameters.await_all_buckets()
    return [entry for entry in local_weights(run, "") if ".query." in entry.what or ".key." in entry.what]


@pytest.mark.extended
def test_logits_are_clipped_as_in_the_bins_of_fixed_sizes():
    """Those of padding, of which there is more or less by the sizes, do not count."""
    by_rank = run_ranks(clipped_by_case, RANKS)
    for name in CLIPPED:
        alone = single_rank_config(clipping(name))
        expected = clipped_weights(single_rank_world(), alone)
        assert len(expected) > 2
        assert first_mismatch(expected, [found[name] for found in by_rank], 1e-9) is None
        free = replace(alone, optim=replace(alone.optim, qk_clip=0.0))
        assert first_mismatch(expected, [clipped_weights(single_rank_world(), free)], 1e-3) is not None, "heads count"


def test_the_steps_mix_sizes_and_every_mechanism_has_several():
    assert {configuration(name).parallel.context for name in CASES} == set(CONTEXT_MECHANISMS)
    mixed = 0
    for name in CASES:
        by_rank = [found[name].sizes for found in on_ranks()]
        assert len(set(map(len, by_rank))) == 1, "ranks run the same number of microbatches"
        mixed += sum(len(set(at_once)) > 1 for at_once in zip(*by_rank, strict=True))
    assert mixed, "ranks of one microbatch have groups of different sizes"
    seen = Counter(size for name in CASES for found in on_ranks() for size in found[name].sizes)
    assert set(seen) == {1, 2, 4, 8}


def test_the_largest_rank_sends_less_for_attention_than_with_fixed_sizes():
    dynamic, static = ([found[name] for found in on_ranks()] for name in (COUNTED, "static"))
    assert 0 < max(each.sent for each in dynamic) <= 0.7 * max(each.sent for each in static)
