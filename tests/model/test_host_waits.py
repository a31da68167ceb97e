"""How often a MoE layer reads a value of the device, forward and backward together: never on one rank, with capacity or
padding too; at most once with experts on several ranks, for every dispatcher."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.config.run import Config, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import facts_from_config
from moefold.layout.axes import World, create_world
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.row_chunks import in_row_chunks
from moefold.model.steps import Steps
from moefold.model.transformer import Transformer
from moefold.presets.recipe import resolve_recipe
from tests.dispatch.test_dispatchers import DISPATCHERS
from tests.support.host_waits import counted_waits
from tests.support.models import transformer
from tests.support.ranks import run_ranks

MODEL = ["--model.layers=2", "--data.seq_len=32", "--train.micro_batch=2"]
CAPACITY = "--model.moe.capacity"
VARIANTS = {
    "plain": [],
    "capacity": [f"{CAPACITY}.factor=1.0"],
    "capacity, padded": [f"{CAPACITY}.factor=1.0", f"{CAPACITY}.pad=true"],
    "rows in multiples of 16": [f"{CAPACITY}.pad_rows=16"],
    "capacity in multiples of 8": [f"{CAPACITY}.factor=1.25", f"{CAPACITY}.pad_rows=8"],
    "shared experts": ["--model.moe.shared_ffn=32"],
    "experts choose": [
        "--model.moe.router.kind=expert_choice",
        "--model.moe.router.looks_ahead=true",
        "--model.moe.balance.bias_rate=0",
        f"{CAPACITY}.factor=1.0",
    ],
}


def steps_of(model: Transformer, config: Config) -> Steps:
    steps = model.steps(model.stages[0])
    chunks = config.parallel.row_chunks
    return in_row_chunks(steps, chunks) if chunks > 1 else steps


def waits_of_a_pass(world: World, config: Config) -> list[str]:
    """Where the host waited in one forward and backward, after one to warm up."""
    kernels = BoundKernels(facts_from_config(config, "cpu", "fp32"))
    model = transformer(config.model, config.data.seq_len, kernels, world, config.parallel)
    initialise_parameters(model, seed=1)
    shape = (2, config.train.micro_batch, config.data.seq_len)
    tokens, labels = torch.randint(256, shape, generator=torch.Generator().manual_seed(world.rank)).unbind()
    places: list[str] = []
    for _ in range(2):
        carry = model.begin(tokens, labels)
        with counted_waits() as waits:
            for step in steps_of(model, config):
                carry = step.run(carry)
            carry["losses_1M"].sum().backward()
        places = waits.places
    return places


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_never_waits(variant: str):
    config = resolve_recipe("tiny", MODEL + VARIANTS[variant])
    world = create_world(0, 1, torch.device("cpu"), config.parallel)
    assert waits_of_a_pass(world, config) == []


def waits_on_ranks(world: World, name: str, layout: dict[str, int]) -> dict[str, list[str]]:
    parallel = ParallelConfig(**layout, dispatcher=name)  # pyright: ignore[reportArgumentType]
    here = create_world(world.rank, world.size, world.device, parallel, node_size=2)
    found = {}
    for variant in ("plain", "capacity", "rows in multiples of 16", "capacity in multiples of 8"):
        config = replace(resolve_recipe("tiny", MODEL + VARIANTS[variant]), parallel=parallel)
        found[variant] = waits_of_a_pass(here, config)
    return found


@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_with_experts_on_several_ranks_a_layer_waits_at_most_once(name: str, layout: dict[str, int]):
    for found in run_ranks(waits_on_ranks, 4, name, layout):
        for variant, places in found.items():
            assert len(places) <= 2, f"two layers with {variant} wait {len(places)} times: {places}"


def waits_with_row_chunks(world: World) -> list[str]:
    parallel = ParallelConfig(ep=2, dispatcher="dedup", row_chunks=3)
    config = replace(resolve_recipe("tiny", MODEL), parallel=parallel)
    return waits_of_a_pass(world, config)


def test_row_chunks_are_planned_with_one_wait_for_all_of_them():
    for places in run_ranks(waits_with_row_chunks, 2, ep=2):
        assert len(places) == 2, f"two layers wait {len(places)} times: {places}"


def waits_with_clones(world: World, decision: str) -> list[str]:
    parallel = ParallelConfig(ep=2, dispatcher="all_to_all", clone_slots=2, clone_decision=decision)  # pyright: ignore[reportArgumentType]
    config = replace(resolve_recipe("tiny", MODEL), parallel=parallel)
    return waits_of_a_pass(world, config)


@pytest.mark.parametrize("decision", ["now", "previous"])
def test_clones_of_hot_experts_come_with_the_same_wait(decision: str):
    for places in run_ranks(waits_with_clones, 2, decision, ep=2):
        assert len(places) == 2, f"two layers wait {len(places)} times: {places}"
