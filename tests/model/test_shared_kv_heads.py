"""Key/value heads that several ranks share: with fewer heads than tp ranks, or than ranks that swap heads, a step is
that of one rank, and a checkpoint has every head once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.config.rules import check_config
from moefold.config.run import Config, LoraConfig, ParallelConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.parity import (
    RankTrace,
    first_mismatch,
    random_corpus,
    shrink_config,
    single_rank_config,
    trace_one_step,
    trace_run,
)
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks

SWAPPED = {"context": "all_to_all"}
LAYOUTS: dict[int, list[tuple[int, dict[str, Any], dict[str, Any]]]] = {  # by ranks: key heads, degrees, attention
    2: [(1, {"tp": 2}, {"qk_norm": "head"}), (1, {"cp": 2} | SWAPPED, {"sinks": True})],
    4: [
        (2, {"tp": 4}, {"qk_norm": "full", "qkv_bias": True}),
        (1, {"tp": 2, "cp": 2} | SWAPPED, {"qk_norm": "none"}),
    ],
    8: [
        (2, {"tp": 8, "ep": 4}, {"window": 5}),
        (2, {"tp": 4, "cp": 2} | SWAPPED, {"qk_norm": "full"}),
        (2, {"tp": 2, "cp": 4, "context": "hierarchical"}, {"sinks": True}),
        (2, {"tp": 2, "cp": 2, "pp": 2} | SWAPPED, {"qkv_bias": True}),
    ],
}


def sharing(kv_heads: int, ranks: int, degrees: dict[str, Any], attention: dict[str, Any]) -> Config:
    """A small model of 8 query heads whose key heads are fewer than the ranks that heads are split over."""
    config = PRESETS["tiny"]()
    train = replace(config.train, precision="fp64")
    config = shrink_config(replace(config, parallel=ParallelConfig(**degrees), train=train), ranks)
    of_model = replace(config.model.attention, heads=8, kv_heads=kv_heads, **attention)
    return check_config(replace(config, model=replace(config.model, attention=of_model)), ranks)


LORA = LoraConfig(rank=4, alpha=6.0)
EXTRAS: dict[str, dict[str, Any]] = {  # sections of a configuration
    "adapters, dropout": {"lora": replace(LORA, dropout=0.25)},
    "adapters, magnitudes": {"lora": replace(LORA, dora=True)},
    "clipped logits": {},
}


def with_extra(name: str) -> Config:
    """Two key heads on four ranks. Selection biases, which adapters do not have, stay."""
    config = sharing(2, 4, {"tp": 4}, {"qk_norm": "none", "qkv_bias": True})
    moe = config.model.moe
    moe = replace(moe, balance=replace(moe.balance, bias_rate=0.0))
    config = replace(config, model=replace(config.model, moe=moe), **EXTRAS[name])
    if name == "clipped logits":
        config = replace(config, optim=replace(config.optim, qk_clip=1e-3))
    return check_config(config, 4)


def two_steps(world: World, configs: Sequence[Config]) -> list[tuple[RankTrace, dict[str, tuple[int, ...]]]]:
    """Losses, gradients and weights of two steps, and the shapes of what a checkpoint would have. Ranks 0-3 and 4-7 are
    taken for two nodes."""
    found: list[tuple[RankTrace, dict[str, tuple[int, ...]]]] = []
    for config in configs:
        here = create_world(world.rank, world.size, world.device, config.parallel, node_size=4)
        run = assemble_run(config, here, Path("."), random_corpus(config))
        trace = [*trace_one_step(run), *trace_one_step(run)]
        tensors = collect_tensors(run.model, run.optimizer)
        found.append((trace, {name: tuple(tensor.shape) for name, tensor in tensors.items()}))
    return found


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_ranks_that_share_heads_agree_with_one_rank(ranks: int):
    configs = [sharing(kv_heads, ranks, degrees, attention) for kv_heads, degrees, attention in LAYOUTS[ranks]]
    by_rank = run_ranks(two_steps, ranks, configs)
    for number, config in enumerate(configs):
        traces, shapes = zip(*(found[number] for found in by_rank), strict=True)
        alone = single_rank_config(config)
        alone = replace(alone, train=replace(alone.train, micro_batch=1))
        expected = trace_run(alone, single_rank_world(), 2)
        difference = first_mismatch(expected, traces, 1e-11)
        assert difference is None, f"{config.parallel}: {difference}"
        saved = [each for of_rank in shapes for each in of_rank.items()]
        keys = {shape[0] for name, shape in saved if name.endswith("attention.key.weight")}
        assert keys == {config.model.attention.kv_heads}, "one copy of every head"


def step_in_fp8(world: World, config: Config) -> list[float]:
    """The loss and the length of the gradient."""
    here = create_world(world.rank, world.size, world.device, config.parallel) if world.size > 1 else world
    run = assemble_run(config, here, Path("."), random_corpus(config))
    report = take_next_step(run)
    return [report.loss, report.grad_norm]


def test_fp8_products_of_shared_heads_have_the_gradient_of_one_rank():
    """Ranks quantise the gradients of their own queries."""
    config = sharing(1, 2, {"tp": 2}, {"head_dim": 16})
    train = replace(config.train, precision="fp32")
    model = replace(config.model, moe=replace(config.model.moe, ffn=16))
    precision = replace(config.precision, recipe="fp8_block")
    config = check_config(replace(config, model=model, train=train, precision=precision), 2)
    both = run_ranks(step_in_fp8, 2, config)
    alone = replace(single_rank_config(config), train=replace(train, micro_batch=1))
    assert both[0] == pytest.approx(step_in_fp8(single_rank_world(), alone), rel=0.005)


def test_adapters_and_clipped_logits_of_shared_heads_are_those_of_one_rank():
    configs = [with_extra(name) for name in EXTRAS]
    by_rank = run_ranks(two_steps, 4, configs)
    for number, (name, config) in enumerate(zip(EXTRAS, configs, strict=True)):
        traces = [found[number][0] for found in by_rank]
        alone = replace(single_rank_config(config), train=replace(config.train, micro_batch=1))
        expected = trace_run(alone, single_rank_world(), 2)
        difference = first_mismatch(expected, traces, 1e-11)
        assert difference is None, f"{name}: {difference}"
