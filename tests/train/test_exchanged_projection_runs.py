"""Runs whose projections are inside exchanges give what one rank gives, forward and backward, and repeat to the bit.
Validation and samples go by collectives."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moefold.checkpoint.format.retention import step_folder_name
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.model.projections_in_exchanges import ProjectionsInExchanges
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
from tests.support.runs import SMALL, corpus, numbers
from tests.train.test_pipeline_runs import finish, start_ranks

TILES = "--parallel.tiles=projections"
MLPS = "--model.moe.shared_ffn=32 --model.moe.dense_layers=1"
BIASES = "--model.attention.qkv_bias=true --model.attention.out_bias=true"
LATENTS = "--model.attention.kind=mla --model.attention.qk_norm=none --model.attention.kv_heads=4"
LATENTS += " --model.attention.rope_dim=8"

# ranks -> what it is -> keys
CASES: dict[int, dict[str, str]] = {
    2: {
        "all MLPs, norms of heads, biases": f"--parallel.tp=2 {MLPS} {BIASES} --model.attention.qk_norm=head",
        "gathered again, deferred": f"--parallel.tp=2 {MLPS} --memory.recompute=sar --pipeline.defer=true",
        "latents, look ahead, rebuilt, fully sharded": (
            f"--parallel.tp=2 {LATENTS} {MLPS} --model.mtp=1 --memory.recompute=mlp,shared --shard.mode=zero3"
        ),
    },
    4: {
        "context, rebuilt layers": f"--parallel.tp=2 --parallel.cp=2 {MLPS} --memory.recompute=layer",
        "row chunks, offloaded": (
            f"--parallel.tp=2 --parallel.ep=2 --parallel.row_chunks=2 {MLPS} --memory.offload=out,norm"
        ),
        "zero bubbles": "--parallel.tp=2 --parallel.pp=2 --pipeline.schedule=zb_v --pipeline.vpp=2",
        "key heads of two ranks": f"--parallel.tp=4 --parallel.ep=2 {BIASES}",
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
    config = resolve_recipe("tiny", [*CASES[ranks][name].split(), TILES, "--train.precision=fp64"], None)
    config = comparable_config(config, ranks)
    config = replace(config, train=replace(config.train, validate_sequences=2 * config.train.global_batch))
    if "key heads" in name:
        attention = replace(config.model.attention, heads=8, kv_heads=2)
        config = replace(config, model=replace(config.model, attention=attention))
    return check_config(config, ranks)


def assembled(config: Config, world: World) -> Run:
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    return assemble_run(config, here, Path("."), random_corpus(config))


def exchanges_of(run: Run) -> int:
    over_tp = run.model.tp_projections
    assert isinstance(over_tp, ProjectionsInExchanges)
    return over_tp.tiled.arena.number


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


def test_a_resumed_run_ends_as_one_that_was_not(tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    keys = ["--parallel.tp", "2", "--parallel.tiles", "projections", "--model.moe.shared_ffn", "32"]
    keys += ["--train.steps", "3", "--checkpoint.every", "2", "--checkpoint.keep", "9", "--train.device", "cpu"]
    start = ["train", "tiny", *SMALL, *corpus(tmp_path), *keys]
    finish(start_ranks([*start, "--out", str(whole)], 2, tmp_path), tmp_path)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / step_folder_name(3))
    finish(start_ranks([*start, "--out", str(parts), "--resume", "auto"], 2, tmp_path), tmp_path)
    assert numbers(whole) == numbers(parts)
