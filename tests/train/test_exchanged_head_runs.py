"""Runs whose heads are swapped inside projections give what one rank gives, forward and backward, twice the same bits.
Validation swaps by collectives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.model.heads_in_exchanges import HeadsInExchanges
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import validation_loss
from moefold.train.parity import (
    RankTrace,
    comparable_config,
    first_mismatch,
    random_corpus,
    single_rank_config,
    trace_one_step,
)
from tests.support.ranks import run_ranks

SWAP = "--parallel.context=all_to_all"
BIASES = "--model.attention.qkv_bias=true --model.attention.out_bias=true"
FOUR = "--parallel.cp=4 --model.attention.kv_heads=4"

# ranks -> what it is -> keys
CASES: dict[int, dict[str, str]] = {
    2: {
        "norms of heads, biases, sinks, a window": (
            f"--parallel.cp=2 {BIASES} --model.attention.qk_norm=head --model.attention.sinks=true "
            "--model.attention.window=5"
        ),
        "no norms, some dims turn, offloaded": (
            "--parallel.cp=2 --model.attention.qk_norm=none --model.attention.rope_dim=4 --memory.offload=out,norm"
        ),
        "layers run again": "--parallel.cp=2 --memory.recompute=layer",
        "documents, look ahead, core and norm rebuilt, deferred": (
            "--parallel.cp=2 --data.attend=document --model.mtp=1 --memory.recompute=core,norm --pipeline.defer=true"
        ),
        "clipped logits, fully sharded": (
            "--parallel.cp=2 --model.attention.qk_norm=none --optim.qk_clip=0.001 --shard.mode=zero3"
        ),
    },
    4: {
        "zero bubbles": "--parallel.cp=2 --parallel.pp=2 --pipeline.schedule=zb_v --pipeline.vpp=2",
        "tiles of experts beside": (
            f"{FOUR} --parallel.ep=2 --parallel.dispatcher=symmetric --parallel.tiles=heads,experts"
        ),
        "row chunks, a head a rank": f"{FOUR} --parallel.ep=4 --parallel.row_chunks=2",
    },
}
REPEATED = CASES[2].keys()


class SeenRun(NamedTuple):
    """The first step of a rank, the number of its exchanges then and behind a validation, and whether a second run has
    the same bits."""

    trace: RankTrace
    exchanges: int
    afterwards: int
    repeats: bool


def config_of(name: str, ranks: int) -> Config:
    keys = [SWAP, "--parallel.tiles=heads", *CASES[ranks][name].split(), "--train.precision=fp64"]
    config = resolve_recipe("tiny", keys, None)
    config = comparable_config(config, ranks)
    config = replace(config, train=replace(config.train, validate_sequences=2 * config.train.global_batch))
    return check_config(config, ranks)


def assembled(config: Config, world: World) -> Run:
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    return assemble_run(config, here, Path("."), random_corpus(config))


def exchanges_of(run: Run) -> int:
    heads = run.model.heads_in_exchanges
    assert isinstance(heads, HeadsInExchanges)
    return heads.tiled.arena.number


def see_runs(world: World) -> dict[str, SeenRun]:
    seen: dict[str, SeenRun] = {}
    for name in CASES[world.size]:
        config = config_of(name, world.size)
        run = assembled(config, world)
        trace = trace_one_step(run)
        exchanges = exchanges_of(run)
        validation_loss(run)
        repeats = True
        if name in REPEATED:
            again = trace_one_step(assembled(config, world))
            repeats = all(torch.equal(one.values, other.values) for one, other in zip(trace, again, strict=True))
        seen[name] = SeenRun(trace, exchanges, exchanges_of(run), repeats)
    return seen


@cache
def on_ranks(ranks: int) -> list[dict[str, SeenRun]]:
    return run_ranks(see_runs, ranks)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_losses_gradients_and_weights_are_those_of_one_rank_twice_the_same_bits(ranks: int, name: str):
    alone = single_rank_config(config_of(name, ranks))
    alone = replace(alone, train=replace(alone.train, micro_batch=1))
    expected = trace_one_step(assembled(alone, single_rank_world()))
    seen = [runs[name] for runs in on_ranks(ranks)]
    assert not first_mismatch(expected, [each.trace for each in seen], 1e-9)
    assert all(each.repeats for each in seen)


def test_what_trains_exchanges_and_what_is_looked_at_does_not():
    for ranks in CASES:
        for runs in on_ranks(ranks):
            for seen in runs.values():
                assert seen.exchanges > 0
                assert seen.afterwards == seen.exchanges
