"""Rows of dynamic context parallelism (`parallel.context_sizes dynamic`) as settings of their own. Torch-free.

A rank may share a row with any number of ranks that a group can have. Of each size a setting has one such row, as long
as its ranks hold: the memory of a rank is that of the fullest.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.config.run import Config
from moefold.data.dynamic_context import context_shape
from moefold.plan.memory.run_setting import RunSetting, build_run_setting

FEWEST_MICROBATCHES = 2  # a plan may have more than fixed sizes, and gradients then stay between them


def settings_of_rows(s: RunSetting) -> list[RunSetting]:
    """One setting for each size of a group; with fixed sizes the run's own."""
    parallel = s.parallel
    if parallel.context_sizes == "fixed":
        return [s]
    ranks = s.world // (parallel.tp * parallel.pp)
    shape = context_shape(s.config, ranks)
    microbatches = max(s.microbatches, shape.stages, FEWEST_MICROBATCHES)
    settings: list[RunSetting] = []
    for size in shape.sizes:
        config = config_of_row(s.config, size, shape.limit)
        rows = microbatches * (ranks // size)
        train = replace(config.train, global_batch=rows)
        config = replace(config, train=train)
        settings.append(build_run_setting(config, s.world, s.choices))
    return settings


def config_of_row(config: Config, size: int, limit: int) -> Config:
    """The configuration of fixed sizes whose microbatch is one row of `size` ranks, each with `limit` tokens."""
    parallel = replace(config.parallel, cp=size, context_sizes="fixed", context_sending=())
    data = replace(config.data, seq_len=size * limit)
    train = replace(config.train, micro_batch=1)
    return replace(config, parallel=parallel, data=data, train=train)
