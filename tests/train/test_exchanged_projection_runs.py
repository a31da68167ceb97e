"""Runs whose projections are inside exchanges give what one rank gives, forward and backward, and repeat to the bit.
Validation and samples go by collectives."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moefold.checkpoint.format.retention import step_folder_name
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.model.projections_in_exchanges import ProjectionsInExchanges
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run
from moefold.train.parity import comparable_config
from tests.support.exchanged_runs import SeenRuns, mismatch_with_one_rank, see_runs, validating
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


def config_of(name: str, ranks: int) -> Config:
    config = resolve_recipe("tiny", [*CASES[ranks][name].split(), TILES, "--train.precision=fp64"], None)
    config = comparable_config(config, ranks)
    config = validating(config)
    if "key heads" in name:
        attention = replace(config.model.attention, heads=8, kv_heads=2)
        config = replace(config, model=replace(config.model, attention=attention))
    return check_config(config, ranks)


def exchanges_of(run: Run) -> int:
    over_tp = run.model.tp_projections
    assert isinstance(over_tp, ProjectionsInExchanges)
    return over_tp.tiled.arena.number


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
