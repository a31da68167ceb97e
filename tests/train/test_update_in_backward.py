"""Updates inside backward: the numbers of ordinary steps, with the gradients of a unit or two at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.config.errors import RunFailure
from moefold.config.run import Config, ParallelConfig, ShardConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.non_finite import refuse_non_finite
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks

RANKS = 4
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied_head": True},
    "MTP": {"mtp": 1, "tied_head": True},
}


def configuration(
    when: str,
    model: str = "plain",
    parallel: ParallelConfig | None = None,
    shard: ShardConfig | None = None,
    **optim: Any,
) -> Config:
    config = PRESETS["tiny"]()
    config = replace(config, model=replace(config.model, **MODELS[model]), parallel=parallel or ParallelConfig())
    config = replace(config, shard=shard or ShardConfig())
    config = shrink_config(config, RANKS)
    settings = {"clip_by": "previous", "max_norm": 1e9} | optim
    return replace(config, optim=replace(config.optim, when=when, **settings))


def weights_after(config: Config, world: World, steps: int) -> dict[str, torch.Tensor]:
    run = assemble_run(config, world, Path("."), random_corpus(config))
    for _ in range(steps):
        take_next_step(run)
    run.parameters.await_all_buckets()
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def differing_weights(world: World, pairs: list[tuple[Config, Config]]) -> list[str]:
    """The weights of three steps that differ within a pair of configurations, on this rank."""
    found: list[str] = []
    for first, second in pairs:
        degrees = first.parallel
        here = create_world(world.rank, world.size, world.device, degrees, node_size=2, shard=first.shard)
        a, b = (weights_after(config, here, 3) for config in (first, second))
        found += [f"{first.parallel}: {name}" for name in a if not torch.equal(a[name], b[name])]
    return found


def pair(
    model: str, parallel: ParallelConfig | None = None, shard: ShardConfig | None = None, **optim: Any
) -> tuple[Config, Config]:  # fmt: skip
    first, second = (configuration(when, model, parallel, shard, **optim) for when in ("step", "backward"))
    return first, second


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_updates_inside_backward_are_those_after_it_to_the_bit(model: str, moments: str):
    assert differing_weights(single_rank_world(), [pair(model, moments=moments)]) == []


def test_clipping_by_units_is_the_same_inside_backward_and_after_it():
    assert differing_weights(single_rank_world(), [pair("tied", clip_by="unit", max_norm=0.05)]) == []


@pytest.mark.extended
def test_ranks_update_inside_backward_as_after_it_to_the_bit():
    pairs = [
        pair("plain"),
        pair("MTP", ParallelConfig(ep=2), moments="int8"),
        pair("tied", ParallelConfig(tp=2, ep=2)),
        pair("plain", ParallelConfig(ep=4), clip_by="unit", max_norm=0.05),
        pair("plain", ParallelConfig(cp=2, context="ring", ep=2, etp=2)),
        pair("MTP", ParallelConfig(tp=2, etp=2), rule="muon"),
        pair("tied", ParallelConfig(ep=2), ShardConfig(replicas=2)),
        pair("plain", shard=ShardConfig(sync="hierarchical"), rule="muon", states="host"),
    ]
    for found in run_ranks(differing_weights, RANKS, pairs):
        assert found == []


def one_microbatch(config: Config) -> Config:
    train = replace(config.train, micro_batch=config.train.global_batch)
    return replace(config, train=train)


def watched(run: Run) -> list[int]:
    """Bytes of gradients whenever one arrives, from now on."""
    seen: list[int] = []
    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(run.gradients.held_bytes()))
    return seen


def largest_bytes(run: Run) -> tuple[int, int]:
    """Gradient bytes of the largest unit, and of all."""
    units: dict[str, int] = {}
    for bucket in run.gradients.buckets:
        units[bucket.unit] = units.get(bucket.unit, 0) + bucket.sums.nbytes
    return max(units.values()), sum(units.values())


def peak_gradients(world: World, config: Config) -> tuple[int, int, int]:
    here = create_world(world.rank, world.size, world.device, config.parallel)
    run = assemble_run(config, here, Path("."), random_corpus(config))
    seen = watched(run)
    take_next_step(run)
    assert run.gradients.held_bytes() == 0
    return max(seen), *largest_bytes(run)


def deeper(config: Config) -> Config:
    return replace(config, model=replace(config.model, layers=8))


def test_gradients_of_two_units_exist_at_a_time_on_one_rank():
    config = deeper(one_microbatch(configuration("backward")))
    peak, largest, everything = peak_gradients(single_rank_world(), config)
    assert peak <= 2 * largest < everything / 2


def test_gradients_of_few_units_exist_at_a_time_on_ranks_that_sum_them():
    config = configuration("backward", parallel=ParallelConfig(ep=2))
    config = deeper(replace(config, train=replace(config.train, global_batch=4, micro_batch=2)))
    for peak, largest, everything in run_ranks(peak_gradients, 2, config):
        assert peak <= 3 * largest < everything / 2


def test_a_unit_whose_gradient_is_not_finite_is_left_out_and_named():
    config = one_microbatch(configuration("backward"))
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    take_next_step(run)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    spoiled = dict(run.model.named_parameters())["blocks.1.moe.router.weight"]
    handle = spoiled.register_hook(lambda g: g * float("nan"))
    report = take_next_step(run)
    assert report.skipped_units == ["blocks.1"]
    with pytest.raises(RunFailure, match=r"the weights of blocks\.1 were not touched, others were updated"):
        refuse_non_finite(run, report)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("blocks.1."), name
    # what comes later changes nothing
    handle.remove()
    after = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    take_next_step(run)
    assert all(torch.equal(p, after[name]) for name, p in run.model.named_parameters())


def test_parameters_that_have_moved_are_known_although_gradients_are_freed():
    config = one_microbatch(configuration("backward"))
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    take_next_step(run)
    run.updates.note_moved()
    assert run.gradients.moved == {name for name, _ in run.model.named_parameters()}
