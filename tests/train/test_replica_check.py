"""Replicas are compared by checksums of their weights in every step: a flipped bit names its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from moefold.config.run import Config, ShardConfig
from moefold.layout.axes import World, create_world
from moefold.layout.held_share import held_share_of
from moefold.observe.metrics import read_records
from moefold.shard.weight_checksums import Checksum
from moefold.train.replica_check import ReplicasDiffer, compare_replicas, find_odd_ranks
from moefold.train.step import take_next_step
from tests.support.damaged_runs import damaged_config, damaged_run, found_flips, is_named
from tests.support.launched import launched, small_ranks
from tests.support.ranks import run_ranks
from tests.train.test_lora_runs import LORA, config_of

FLIPS = [
    "flip weight=blocks.0.attention.query.weight bit=3 rank=2 step=2",
    "flip weight=blocks.1.moe.experts.down bit=31 rank=0 step=4",
    "flip weight=embedding.weight bit=0 rank=1 step=3",
]


def test_the_rank_of_a_flipped_bit_is_named_within_the_interval():
    for records in run_ranks(found_flips, 4, FLIPS, 3):
        for fault, record in zip(FLIPS, records, strict=True):
            assert is_named(fault, 3, record), (fault, record)


def compared_steps(world: World, parallel: dict[str, int]) -> int:
    run = damaged_run(world, damaged_config(parallel, compare_every=1))
    for _ in range(2):
        take_next_step(run)
        compare_replicas(run)
    return run.step


def test_sound_replicas_agree_on_layouts_with_shards_of_weights_experts_and_layers():
    for layout in ({"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}):
        assert run_ranks(compared_steps, 4, layout, **layout) == [2] * 4


def odd_ranks(*checksums: Checksum) -> Mapping[int, list[int]]:
    return find_odd_ranks([{("a", (), 1, 0): checksum} for checksum in checksums])


def test_of_three_replicas_the_odd_one_is_named_and_of_two_the_one_that_the_owner_of_the_weights_tells():
    assert odd_ranks(Checksum(1, 1), Checksum(2), Checksum(1)) == {1: [0, 2]}
    assert odd_ranks(Checksum(1, 1), Checksum(2)) == {1: [0]}
    assert odd_ranks(Checksum(2, 1), Checksum(1)) == {0: [1]}
    assert odd_ranks(Checksum(1), Checksum(2, 1)) == {1: [0]}
    assert odd_ranks(Checksum(1), Checksum(1, 1)) == {}
    assert odd_ranks(Checksum(2, 1)) == {0: []}
    assert odd_ranks(Checksum(2, 1), Checksum(2), Checksum(2)) == {0: [1, 2]}
    different = [{("a", (), 1, 0): Checksum(1, 1)}, {("b", (), 1, 0): Checksum(2, 2)}]
    assert find_odd_ranks(different) == {}


@pytest.mark.parametrize("layout", [{}, {"ep": 2}], ids=["dp", "ep"])
def test_of_two_replicas_and_of_one_the_rank_of_a_flipped_bit_is_named(layout: dict[str, int]):
    """With dp 2 each rank updates half of every bucket: the first element of a parameter is one rank's, the last the
    other's. With ep 2 an expert has no replica."""
    faults = [
        f"flip weight={name} bit={bit} rank={rank} step={step}"
        for rank in (0, 1)
        for name, bit, step in [
            ("embedding.weight", 3, 2),
            ("blocks.1.moe.experts.down", 30, 1),
            ("head.norm.weight", 11, 3),
        ]
    ]
    for records in run_ranks(found_flips, 2, faults, 3, layout, **layout):
        for fault, record in zip(faults, records, strict=True):
            assert is_named(fault, 3, record), (fault, record)


def ranks_of_a_damaged_base(world: World, config: Config) -> list[int] | None:
    """The ranks that are named when a bit of the base has flipped on the first rank; none before it has."""
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    run = damaged_run(here, config)
    take_next_step(run)
    compare_replicas(run)
    if world.rank == 0:
        parameter = run.model.get_parameter("blocks.1.moe.experts.down")
        share = held_share_of(parameter)
        held = parameter.data if share is None else share.values
        first = held if isinstance(held, torch.Tensor) else held.tensors()[0]
        first.view(torch.uint8).view(-1)[7] ^= 4
    take_next_step(run)
    try:
        compare_replicas(run)
    except ReplicasDiffer as stopped:
        return stopped.record["ranks"]
    return None


@pytest.mark.parametrize(("mode", "base"), [("zero1", "plain"), ("zero3", "plain"), ("zero3", "nf4")])
def test_the_rank_of_a_flipped_bit_of_a_frozen_base_is_named(mode: Literal["zero1", "zero3"], base: Any):
    config = config_of("tiny", 2, replace(LORA, base=base), shard=ShardConfig(mode))
    train = replace(config.train, precision="fp32")
    config = replace(config, train=train, observe=replace(config.observe, compare_every=1))
    assert run_ranks(ranks_of_a_damaged_base, 2, config) == [[0], [0]]


def test_a_run_stops_before_it_saves_weights_of_replicas_that_differ(tmp_path: Path):
    flip = "flip weight=head.norm.weight bit=9 rank=1 step=2"
    keys = ["--observe.compare_every", "100", "--checkpoint.every", "3", "--train.steps", "6", "--observe.fault", flip]
    with launched(small_ranks(tmp_path, "a", 4, *keys), tmp_path / "log") as launcher:
        assert launcher.wait() == 1, launcher.output()
        said = launcher.output()
    assert "weights of rank 1 differ from those of its replicas on ranks 0, 2, 3, in a step from 1 to 3" in said
    assert "there is no checkpoint" in said
    (fault,) = read_records(tmp_path / "a" / "faults.jsonl")
    assert (fault["cause"], fault["ranks"], fault["step"]) == ("replicas differ", [1], 3)
