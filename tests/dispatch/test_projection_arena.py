"""The arena of projections is refused by name where its ranks have no memory in common, or no kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from moefold.comm.arena import HEADS, PROJECTIONS, open_shared_memory
from moefold.config.errors import UserError
from moefold.config.run import Config, ParallelConfig
from moefold.dispatch.projection_arena import build_tiled_heads, build_tiled_projections, require_kernels
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.exchanged_products import multiply_gathered
from moefold.kernels.linear.swapped_products import project_to_heads
from moefold.layout.axes import World
from tests.support.ranks import run_ranks

KERNELS = BoundKernels(Facts("cpu", "fp32"))
TOO_MANY = 2**60  # bytes


def refusals(world: World) -> list[str]:
    config = Config(parallel=ParallelConfig(tp=2, tiles=("projections",)))
    config = replace(config, train=replace(config.train, precision="fp32"))
    on_two_machines = replace(world, node_size=1)
    messages: list[str] = []
    with pytest.raises(UserError) as refused:
        build_tiled_projections(config, KERNELS, on_two_machines)
    messages.append(str(refused.value))
    with pytest.raises(UserError) as refused:
        open_shared_memory(world.axis("tp"), TOO_MANY, PROJECTIONS)
    messages.append(str(refused.value))
    swapped = replace(config, parallel=ParallelConfig(cp=2, context="all_to_all", tiles=("heads",)))
    with pytest.raises(UserError) as refused:
        build_tiled_heads(swapped, KERNELS, world_of_cp(on_two_machines))
    return [*messages, str(refused.value)]


def world_of_cp(world: World) -> World:
    """The world of two ranks, which are cp ranks."""
    axes = world.axes | {("cp",): replace(world.axis("tp"), name="cp")}
    return replace(world, axes=axes)


@cache
def on_two() -> list[list[str]]:
    return run_ranks(refusals, 2, tp=2)


def test_ranks_of_several_machines_are_refused():
    for projections, _, heads in on_two():
        assert projections.startswith("parallel.tiles = projections needs the ranks of tp on one machine")
        assert heads.startswith("parallel.tiles = heads needs the ranks of cp on one machine")
        assert "lower parallel.cp, or leave heads out of parallel.tiles" in heads


def test_missing_memory_is_told_on_all_ranks_with_the_key_that_asks_for_it():
    for _, missing, _ in on_two():
        assert f"no {TOO_MANY:,} bytes for parallel.tiles = projections" in missing
        assert "leave projections out of parallel.tiles" in missing


def test_a_gpu_without_the_kernels_is_refused():
    hopper = Facts("cuda", "bf16", (9, 0), triton=True)
    for op, user in ((multiply_gathered, PROJECTIONS), (project_to_heads, HEADS)):
        require_kernels(BoundKernels(hopper), op, user)
        for facts in (replace(hopper, triton=False), replace(hopper, capability=(8, 0)), replace(hopper, dtype="fp32")):
            with pytest.raises(UserError, match=f"{user.setting} multiplies by kernels for bf16 on Hopper"):
                require_kernels(BoundKernels(facts), op, user)
