"""Fully sharded runs of FP8 recipes: the losses and checkpoints of whole weights to the bit, whatever is gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.run import Config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.weight_copies import WeightCopies
from moefold.presets.recipe import resolve_recipe
from moefold.shard.fp8_weights import ShardedFp8Weights
from moefold.train.assemble import Run, assemble_run
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run
from tests.support.ranks import run_ranks
from tests.train.test_fp8_runs import SMALL, counting_corpus, losses_of

RANKS = 4
STORED = ("--precision.storage", "fp8")
SHARDED = ("--shard.mode", "zero3")
KINDS: dict[str, tuple[str, ...]] = {
    "blocks": ("--precision.recipe", "fp8_block"),
    "tensors": ("--precision.recipe", "fp8_tensor"),
    "experts in parallel, bf16": (
        *("--precision.recipe", "fp8_block", "--train.precision", "bf16", "--parallel.ep", "2"),
        *("--parallel.dispatcher", "all_to_all"),
    ),
}


def config_of(*words: str) -> Config:
    batch = ("--train.micro_batch", "1", "--train.global_batch", str(RANKS), "--data.seq_len", "32")
    return resolve_recipe("tiny", [*SMALL, *batch, *words], RANKS)


def made_run(world: World, config: Config, folder: Path = Path(".")) -> Run:
    here = world
    if world.size > 1:
        here = create_world(world.rank, world.size, world.device, config.parallel, node_size=RANKS, shard=config.shard)
    return assemble_run(config, here, folder, counting_corpus())


def losses_on_rank(world: World, configs: list[Config]) -> list[list[float]]:
    return [losses_of(made_run(world, config), 2) for config in configs]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_whole_weights_to_the_bit(kind: str):
    words = KINDS[kind]
    variants = [words, (*words, *SHARDED), (*words, *SHARDED, *STORED)]
    for whole, sharded, stored in run_ranks(losses_on_rank, RANKS, [config_of(*each) for each in variants]):
        assert sharded == whole
        assert stored == whole


def held_on_rank(world: World, config: Config) -> dict[str, Any]:
    """What a rank holds between steps: copies of weights, and the bytes of stored ones over their elements."""
    run = made_run(world, config)
    losses_of(run, 1)
    run.parameters.publish()
    copies = [getattr(parameter.tensor, "copies", WeightCopies()) for parameter in declared_parameters(run.model)]
    storages = [bucket.storage for bucket in run.gradients.buckets]
    stored = [storage for storage in storages if isinstance(storage, ShardedFp8Weights)]
    return {
        "copies": sum(len(each.made) for each in copies),
        "stored copies": sum(each.stored is not None for each in copies),
        "bytes": sum(storage.mine.nbytes for storage in stored),
        "elements": sum(len(storage.weights) for storage in stored),
    }


@pytest.mark.parametrize("stored", [(), STORED], ids=["gathered in fp32", "gathered in FP8"])
def test_between_steps_a_rank_holds_no_copy_and_its_share_of_bytes(stored: tuple[str, ...]):
    for held in run_ranks(held_on_rank, RANKS, config_of(*KINDS["blocks"], *SHARDED, *stored)):
        assert held["copies"] == held["stored copies"] == 0
        assert held["bytes"] == held["elements"] / RANKS
        assert bool(held["bytes"]) == bool(stored)


def bytes_of_experts(world: World, configs: list[Config]) -> list[dict[str, int]]:
    """What a step sends to gather experts, which all have a recipe, and to agree on their scales."""
    found: list[dict[str, int]] = []
    for config in configs:
        run = made_run(world, config)
        losses_of(run, 1)
        with counted_bytes_sent() as sent:
            losses_of(run, 1)
        of_experts = {what: count for (what, axis), count in sent.items() if axis.startswith("gradients of edp")}
        found.append(of_experts)
    return found


@pytest.mark.parametrize(("kind", "width"), [("blocks", 4), ("experts in parallel, bf16", 2)])
def test_gathers_send_one_byte_for_each_weight_that_is_stored_in_fp8_and_little_for_scales(kind: str, width: int):
    words = (*KINDS[kind], *SHARDED)
    for wide, stored in run_ranks(bytes_of_experts, RANKS, [config_of(*words), config_of(*words, *STORED)]):
        assert "max" not in wide
        assert stored["unit"] * width == wide["unit"]
        assert 0 < stored["max"] < 0.02 * stored["unit"]


def resumed_on_rank(world: World, config: Config, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of two steps behind a checkpoint, and of a run that was resumed from it."""
    run = made_run(world, config, folder)
    with make_background_saver(run, print) as saver:
        losses_of(run, 1)
        begin_checkpoint(run, saver)
    unbroken = losses_of(run, 2)
    again = made_run(world, config, folder / "again")
    losses_of(again, 2)
    assert resume_run(again, str(folder / "checkpoints"), print)
    return unbroken, losses_of(again, 2)


def test_a_checkpoint_of_shares_in_fp8_is_resumed_so_and_by_one_rank(tmp_path: Path):
    words = (*KINDS["blocks"], *STORED)
    expected: list[list[float]] = []
    for unbroken, resumed in run_ranks(resumed_on_rank, RANKS, config_of(*words, *SHARDED), tmp_path):
        assert resumed == unbroken
        expected.append(unbroken)
    alone = made_run(single_rank_world(), config_of(*words), tmp_path / "alone")
    assert resume_run(alone, str(tmp_path / "checkpoints"), print)
    torch.testing.assert_close(losses_of(alone, 2), expected[0], rtol=1e-6, atol=0)
