"""Runs whose dense products are inside exchanges, beside one rank: the first step of each, and its exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from moefold.config.run import Config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import validation_loss
from moefold.train.parity import (
    ParityMismatch,
    RankTrace,
    first_mismatch,
    random_corpus,
    single_rank_config,
    trace_one_step,
)

SeenRuns = dict[str, "SeenRun"]


class SeenRun(NamedTuple):
    """The first step of a rank, the number of its exchanges then and behind a validation, and whether a second run has
    the same bits."""

    trace: RankTrace
    exchanges: int
    afterwards: int
    repeats: bool


def validating(config: Config) -> Config:
    """The same run with sequences for two batches of validation."""
    return replace(config, train=replace(config.train, validate_sequences=2 * config.train.global_batch))


def assembled(config: Config, world: World) -> Run:
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    return assemble_run(config, here, Path("."), random_corpus(config))


def see_runs(world: World, configs: Mapping[str, Config], exchanges_of: Callable[[Run], int]) -> SeenRuns:
    """On every rank; each run is begun twice."""
    seen: SeenRuns = {}
    for name, config in configs.items():
        run = assembled(config, world)
        trace = trace_one_step(run)
        exchanges = exchanges_of(run)
        validation_loss(run)
        again = trace_one_step(assembled(config, world))
        repeats = all(torch.equal(one.values, other.values) for one, other in zip(trace, again, strict=True))
        seen[name] = SeenRun(trace, exchanges, exchanges_of(run), repeats)
    return seen


def mismatch_with_one_rank(config: Config, traces: list[RankTrace]) -> ParityMismatch | None:
    alone = single_rank_config(config)
    alone = replace(alone, train=replace(alone.train, micro_batch=1))
    expected = trace_one_step(assembled(alone, single_rank_world()))
    return first_mismatch(expected, traces, 1e-9)
