"""Runs by the symmetric dispatcher have the losses of dedup to the bit, with what else a layer may have."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from moefold.layout.axes import World, create_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks

SIZES = [
    "--model.layers=2",
    "--data.seq_len=32",
    "--train.micro_batch=1",
    "--train.global_batch=8",
    "--model.moe.shared_ffn=16",
    "--parallel.ep=2",
]
RUNS = {
    "paired, dispatched again": ["--parallel.pp=2", "--pipeline.pair=true", "--memory.recompute=dispatch"],
    "in step, dispatched again": [
        "--parallel.pp=2",
        "--pipeline.pair=true",
        "--pipeline.pairs=alike",
        "--memory.recompute=dispatch",
    ],
    "latent in fp8 with a capacity, fully sharded": [
        "--model.moe.latent=16",
        "--precision.dispatch=fp8",
        "--precision.combine_gradient=e4m3",
        "--model.moe.capacity.factor=1.0",
        "--shard.mode=zero3",
    ],
    "padded rows of chunks over tp": [
        "--parallel.tp=2",
        "--model.moe.capacity.pad_rows=16",
        "--memory.expert_chunk=128",
    ],
}


def losses_of(world: World, run: str, dispatcher: str) -> list[tuple[float, float]]:
    config = resolve_recipe("tiny", [*SIZES, *RUNS[run], f"--parallel.dispatcher={dispatcher}"], world.size)
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    assembled = assemble_run(config, here, Path("."), random_corpus(config))
    reports = [take_next_step(assembled) for _ in range(2)]
    return [(report.loss, report.grad_norm) for report in reports]


def all_losses(world: World) -> dict[str, list[list[tuple[float, float]]]]:
    return {run: [losses_of(world, run, name) for name in ("symmetric", "dedup")] for run in RUNS}


@cache
def on_four():
    return run_ranks(all_losses, 4)


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_norms_are_those_of_dedup(run: str):
    symmetric, dedup = on_four()[0][run]
    assert symmetric == dedup
