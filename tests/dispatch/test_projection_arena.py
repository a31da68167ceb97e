"""The arena of projections is refused by name where its ranks have no memory in common, or no kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from moefold.comm.arena import PROJECTIONS, open_shared_memory
from moefold.config.errors import UserError
from moefold.config.run import Config, ParallelConfig
from moefold.dispatch.projection_arena import build_tiled_projections, require_kernels
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
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
    return [*messages, str(refused.value)]


@cache
def on_two() -> list[list[str]]:
    return run_ranks(refusals, 2, tp=2)


def test_ranks_of_several_machines_are_refused():
    for several, _ in on_two():
        assert several.startswith("parallel.tiles = projections needs the ranks of tp on one machine")


def test_missing_memory_is_told_on_all_ranks_with_the_key_that_asks_for_it():
    for _, missing in on_two():
        assert f"no {TOO_MANY:,} bytes for parallel.tiles = projections" in missing
        assert "leave projections out of parallel.tiles" in missing


def test_a_gpu_without_the_kernels_is_refused():
    hopper = Facts("cuda", "bf16", (9, 0), triton=True)
    require_kernels(BoundKernels(hopper))
    for facts in (replace(hopper, triton=False), replace(hopper, capability=(8, 0)), replace(hopper, dtype="fp32")):
        with pytest.raises(UserError, match="multiplies by kernels for bf16 on Hopper"):
            require_kernels(BoundKernels(facts))
