"""Runs with `parallel.tiles experts` are those of the symmetric dispatcher without, with what else a layer or a step
may have."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from moefold.dispatch.tiled_experts import TiledExperts
from moefold.layout.axes import World, create_world
from moefold.model.moe.layer import symmetric_dispatchers
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks

SIZES = [
    "--model.layers=2",
    "--model.hidden=32",
    "--model.moe.ffn=16",
    "--data.seq_len=16",
    "--train.micro_batch=1",
    "--train.global_batch=4",
    "--train.precision=fp64",
    "--parallel.ep=2",
    "--parallel.dispatcher=symmetric",
]
RUNS = {
    "zero bubbles, shared experts": ["--parallel.pp=2", "--pipeline.schedule=zb_h1", "--model.moe.shared_ffn=16"],
    "sharded experts of latents, a capacity, MTP": [
        "--parallel.etp=2",
        "--model.moe.latent=16",
        "--model.moe.capacity.factor=1.0",
        "--model.mtp=1",
    ],
    "layers run again, fully sharded": ["--memory.recompute=layer@0,moe@1", "--shard.mode=zero3"],
    "little room": ["--parallel.room=1.0", "--model.moe.capacity.pad_rows=8", "--parallel.tp=2"],
}


class Losses(NamedTuple):
    """Loss, norm of the gradient and whether a step was run again; and how many dispatchers have tiles."""

    steps: list[tuple[float, float, bool]]
    tiled: int


def losses_of(world: World, run: str, tiles: str) -> Losses:
    config = resolve_recipe("tiny", [*SIZES, *RUNS[run], f"--parallel.tiles={tiles}"], world.size)
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    assembled = assemble_run(config, here, Path("."), random_corpus(config))
    reports = [take_next_step(assembled) for _ in range(2)]
    tiled = [isinstance(each.direct, TiledExperts) for each in symmetric_dispatchers(assembled.model)]
    return Losses([(report.loss, report.grad_norm, report.is_repeated) for report in reports], sum(tiled))


def all_losses(world: World) -> dict[str, list[Losses]]:
    return {run: [losses_of(world, run, tiles) for tiles in ("experts", "")] for run in RUNS}


@cache
def on_four() -> list[dict[str, list[Losses]]]:
    return run_ranks(all_losses, 4)


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_norms_are_those_of_the_run_without_tiles(run: str):
    for rank in on_four():
        tiled, plain = rank[run]
        assert (tiled.tiled > 0, plain.tiled) == (True, 0)
        assert tiled.steps == plain.steps


def test_a_step_without_room_is_run_again():
    tiled, _ = on_four()[0]["little room"]
    assert any(repeated for *_, repeated in tiled.steps)
