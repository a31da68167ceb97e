"""Runs in row chunks give what one rank with all experts gives, forward and backward, and repeat to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from moefold.config.run import Config, MemoryConfig, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.parity import RankTrace, first_mismatch, shrink_config, single_rank_config, trace_run
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks

SHARED = {"shared_ffn": 16}
BY_DEDUP = ParallelConfig(ep=2, dispatcher="dedup", row_chunks=3)
FEW_TOKENS = 4
LESS = {"fp64": 1e-12, "fp32": 1e-6}


def chunked(
    parallel: ParallelConfig,
    moe: dict[str, Any] = SHARED,
    precision: str = "fp64",
    recompute: tuple[str, ...] = (),
    pipeline: PipelineConfig | None = None,
    tokens: int = 16,
) -> Config:
    tiny = PRESETS["tiny"]()
    model = replace(tiny.model, moe=with_moe_keys(tiny.model.moe, **moe))
    train = replace(tiny.train, precision=precision)
    memory = MemoryConfig(recompute=recompute)
    pipeline = pipeline or PipelineConfig()
    config = replace(tiny, model=model, train=train, memory=memory, parallel=parallel, pipeline=pipeline)
    small = shrink_config(config, 2)
    train = replace(small.train, global_batch=2, micro_batch=1)
    one_layer = replace(small.model, layers=1)
    return replace(small, train=train, model=one_layer, data=replace(small.data, seq_len=tokens))


CASES = {
    "all_to_all": (chunked(ParallelConfig(ep=2, dispatcher="all_to_all", row_chunks=2)), "learned"),
    "dedup of latents": (chunked(replace(BY_DEDUP, row_chunks=4), SHARED | {"latent": 16}), "skewed"),
    "all_gather in fp32, no shared experts": (
        chunked(ParallelConfig(ep=2, dispatcher="all_gather", row_chunks=2), {}, "fp32"),
        "empty experts",
    ),
    "symmetric": (chunked(ParallelConfig(ep=2, dispatcher="symmetric", row_chunks=3)), "one expert"),
    "pieces of experts, recomputed": (
        chunked(ParallelConfig(etp=2, dispatcher="all_to_all", row_chunks=3), recompute=("experts", "norm")),
        "learned",
    ),
    "sent again": (chunked(BY_DEDUP, recompute=("sar",)), "learned"),
    "paired": (chunked(BY_DEDUP, pipeline=PipelineConfig(pair=True)), "learned"),
    "chunks without tokens, a capacity": (
        chunked(replace(BY_DEDUP, row_chunks=FEW_TOKENS + 2), {"capacity_factor": 1.0}, tokens=FEW_TOKENS),
        "skewed",
    ),
}


REPEATED = ("symmetric", "paired")


def trace_cases(world: World, names: Iterable[str] = CASES) -> dict[str, RankTrace]:
    """Losses and gradients of the first step."""
    found: dict[str, RankTrace] = {}
    for name in names:
        config, routing = CASES[name]
        config = single_rank_config(config) if world.size == 1 else config
        here = create_world(world.rank, world.size, world.device, config.parallel)
        trace = trace_run(config, here, 1, routing)
        found[name] = [entry for entry in trace if " weight " not in entry.what]
    return found


def trace_and_repeat(world: World) -> tuple[dict[str, RankTrace], dict[str, RankTrace]]:
    return trace_cases(world), trace_cases(world, REPEATED)


@cache
def on_two_ranks() -> list[tuple[dict[str, RankTrace], dict[str, RankTrace]]]:
    return run_ranks(trace_and_repeat, 2)


@cache
def on_one_rank() -> dict[str, RankTrace]:
    return trace_cases(single_rank_world())


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_rank(name: str):
    config, _ = CASES[name]
    ranks = [traces[name] for traces, _ in on_two_ranks()]
    assert any("experts" in entry.what for entry in ranks[0])
    assert not first_mismatch(on_one_rank()[name], ranks, LESS[config.train.precision])


@pytest.mark.parametrize("name", REPEATED)
def test_two_runs_have_the_same_bits(name: str):
    for first, second in on_two_ranks():
        for one, other in zip(first[name], second[name], strict=True):
            assert torch.equal(one.values, other.values), one.what
