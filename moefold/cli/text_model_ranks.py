"""Commands that load a text model, on one rank or on several: their layout, their start, and the model on each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.retention import checkpoints_at
from moefold.checkpoint.format.verify import open_checkpoint
from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.cli.text_model_options import TextModelOptions
from moefold.cli.train import serve_store
from moefold.config.read import with_values
from moefold.config.run import Config, ParallelConfig
from moefold.layout.environment import read_environment
from moefold.layout.spawn import run_local_ranks
from moefold.observe.printer import print_nothing
from moefold.presets.command_options import check_rank_count
from moefold.train.evaluation_config import (
    degrees_of,
    evaluation_config,
    require_evaluation,
    with_layout_overrides,
    without_capacity,
)
from moefold.watch.guard import guarded_rank

if TYPE_CHECKING:
    from moefold.train.text_model import TextModel

UseTextModel = Callable[["TextModel"], None]


def run_on_ranks(
    argv: Sequence[str], options: TextModelOptions, overrides: Sequence[str], use_model: UseTextModel
) -> int:
    """Start the ranks that `options` ask for with the command `argv`, or, on a rank, give the model to `use_model`."""
    options.require_source()
    started = check_rank_count(options.nproc)
    starts_ranks = started > 1 and "RANK" not in os.environ
    place = read_environment(os.environ)
    ranks = started if starts_ranks else place.size
    parallel = layout_on_ranks(options, overrides, ranks)
    if starts_ranks:
        return run_local_ranks(argv, ranks, serve_store=serve_store)
    if place.size == 1:
        use_on_rank(options, parallel, use_model)
    else:
        with guarded_rank():
            use_on_rank(options, parallel, use_model)
    return 0


def layout_on_ranks(options: TextModelOptions, overrides: Sequence[str], ranks: int) -> ParallelConfig:
    """The layout of the source, as far as there are several ranks to fold, with the overrides; refused where the model
    cannot be cut so."""
    saved = saved_config(options.source)
    own = ParallelConfig()
    if ranks > 1:
        own = degrees_of(saved.parallel)
    parallel = with_layout_overrides(own, overrides)
    model = without_capacity(saved.model)
    config = evaluation_config(model, parallel, options.seq_len, ranks)
    require_evaluation(config, ranks)
    return parallel


def saved_config(path: Path) -> Config:
    """What is known of a model without reading its weights. Checkpoints that cannot be opened are left to who reads
    them."""
    options = path / "config.json"
    if options.is_file():
        folder = open_model_folder(path)
        described = describe_model(folder)
        return Config(model=described.model)
    for checkpoint in checkpoints_at(path):
        try:
            state = open_checkpoint(checkpoint).state
        except DamagedCheckpoint:
            continue
        return with_values(Config(), state["config"], {})
    return Config()


def use_on_rank(options: TextModelOptions, parallel: ParallelConfig, use_model: UseTextModel) -> None:
    from moefold.comm.host_objects import first_object  # torch, from here on
    from moefold.layout.process_groups import joined_world
    from moefold.train.text_model import load_text_model

    with joined_world(parallel, options.device) as world:
        arguments = options.load_arguments() | {"device": str(world.device), "world": world, "parallel": parallel}
        if world.rank != 0:
            arguments["say"] = print_nothing
        use_model(load_text_model(**arguments))
        first_object(None, world.everyone)  # all ranks are here: rank 0 may take the store with it
