"""Bad values of frozen weights are found where they lie: in a rank's share, and in blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.config.run import Config, ShardConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.held_blocks import held_blocks_of
from moefold.layout.held_share import held_share_of
from moefold.precision.base_blocks import BaseBlocks
from moefold.train import finite_checks
from moefold.train.assemble import assemble_run
from moefold.train.finite_checks import bad_state
from moefold.train.parity import random_corpus
from tests.support.ranks import run_ranks
from tests.train.test_lora_runs import LORA, SHARDED, config_of

DOWN = "blocks.1.moe.experts.down"


def found_in_base(world: World, config: Config) -> tuple[int, tuple[str, int | None] | None]:
    """How many values of a stack a rank has, and where it finds the last of them, which is damaged."""
    here = world
    if world.size > 1:
        here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    run = assemble_run(config, here, Path("/nowhere"), random_corpus(config))
    assert bad_state(run) is None
    parameter = run.model.get_parameter(DOWN)
    share = held_share_of(parameter)
    held = held_blocks_of(parameter) if share is None else share.values
    assert held is not None
    if held.numel():
        damaged = held.scales if isinstance(held, BaseBlocks) else held
        assert isinstance(damaged, torch.Tensor)
        damaged.view(-1)[-1] = torch.nan
    bad = bad_state(run)
    return held.numel(), bad and (bad.tensor, bad.expert)


def config_of_base(base: str, shard: ShardConfig, world: int) -> Config:
    config = config_of("tiny", world, lora=replace(LORA, base=base), shard=shard)
    return replace(config, train=replace(config.train, precision="fp32"))


def test_a_bad_block_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finite_checks, "DEQUANTISED_TOGETHER", 100)  # some rows at a time
    config = config_of_base("nf4", ShardConfig(), 1)
    _, found = found_in_base(single_rank_world(), config)
    assert found == (DOWN, config.model.moe.experts - 1)


@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_a_bad_value_of_a_frozen_share_is_found(base: str):
    config = config_of_base(base, SHARDED, 2)
    experts = config.model.moe.experts
    each = config.model.moe.ffn * config.model.hidden
    before = 0
    for held, found in run_ranks(found_in_base, 2, config):
        before += held
        assert found == ((DOWN, before // each - 1) if held else None)
    assert before == experts * each
