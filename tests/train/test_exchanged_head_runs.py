"""Runs whose heads are swapped inside projections give what one rank gives, forward and backward, twice the same bits.
Validation swaps by collectives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.model.heads_in_exchanges import HeadsInExchanges
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run
from moefold.train.parity import comparable_config
from tests.support.exchanged_runs import SeenRuns, mismatch_with_one_rank, see_runs, validating
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
        "two sequences at a time, which documents cut": f"--parallel.cp=2 {BIASES} --data.attend=document",
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


def config_of(name: str, ranks: int) -> Config:
    keys = [SWAP, "--parallel.tiles=heads", *CASES[ranks][name].split(), "--train.precision=fp64"]
    config = resolve_recipe("tiny", keys, None)
    config = comparable_config(config, ranks)
    if name.startswith("two sequences"):
        config = replace(config, train=replace(config.train, micro_batch=2))
    config = validating(config)
    return check_config(config, ranks)


def exchanges_of(run: Run) -> int:
    heads = run.model.heads_in_exchanges
    assert isinstance(heads, HeadsInExchanges)
    return heads.tiled.arena.number


@cache
def on_ranks(ranks: int) -> list[SeenRuns]:
    configs = {name: config_of(name, ranks) for name in CASES[ranks]}
    return run_ranks(see_runs, ranks, configs, exchanges_of)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_losses_gradients_and_weights_are_those_of_one_rank_twice_the_same_bits(ranks: int, name: str):
    seen = [runs[name] for runs in on_ranks(ranks)]
    assert not mismatch_with_one_rank(config_of(name, ranks), [each.trace for each in seen])
    assert all(each.repeats for each in seen)


def test_what_trains_exchanges_and_what_is_looked_at_does_not():
    for ranks in CASES:
        for runs in on_ranks(ranks):
            for seen in runs.values():
                assert seen.exchanges > 0
                assert seen.afterwards == seen.exchanges
