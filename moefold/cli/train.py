"""`moefold train`: check everything that can be checked without torch, then train, here or on several ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from moefold.config.run import Config
from moefold.layout.environment import read_environment
from moefold.layout.spawn import run_local_ranks
from moefold.presets.command_options import check_rank_count, read_options
from moefold.presets.recipe import resolve_recipe

if TYPE_CHECKING:
    from moefold.layout.axes import World


@dataclass(frozen=True)
class TrainOptions:
    """Train a Mixture-of-Experts model. Writes metrics, configuration and checkpoints into one folder."""

    recipe: tyro.conf.Positional[str] = "tiny"
    """A preset, or a YAML file of configuration keys (such as an earlier run's config.yaml)."""
    out: Path | None = None
    """The run's folder; by default a new one under runs/."""
    from_hf: Path | None = None
    """A folder of Hugging Face weights to start from: its config.json is the model; its tokenizer.json is used."""
    resume: str | None = None
    """auto: continue the run in --out if it has a checkpoint. A path: start from the checkpoint there."""
    nproc: int = 1
    """How many ranks to start on this machine."""
    port: int | None = None
    """Where the ranks of --nproc meet; by default a free port."""


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(TrainOptions, argv, "train")
    here = read_environment(os.environ)
    starts = "RANK" not in os.environ and options.nproc != 1
    world = check_rank_count(options.nproc) if starts else here.size
    config = resolve_recipe(options.recipe, overrides, world, change_from_hf(options.from_hf))
    out = options.out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if starts:
        return run_local_ranks(rank_arguments(options, overrides, out), options.nproc, options.port)

    from moefold.comm.collectives import all_gather_objects  # torch, from here on
    from moefold.layout.process_groups import joined_world
    from moefold.train.loop import run_training

    with joined_world(config.parallel, config.train.device) as joint:
        agreed_out = Path(all_gather_objects(str(out), joint.everyone)[0])  # its default name holds the time
        with checked_collectives(config, joint):
            run_training(config, joint, agreed_out, options.resume, options.from_hf)
    return 0


def change_from_hf(path: Path | None) -> Callable[[Config], Config]:
    """The recipe with the model and the tokenizer of a folder. Read without torch, so that what is not supported is
    refused at once."""
    if path is None:
        return lambda recipe: recipe

    from moefold.checkpoint.hf.config_json import describe_model
    from moefold.checkpoint.hf.model_folder import file_in_folder, open_model_folder

    described = describe_model(open_model_folder(path))
    tokenizer = path / "tokenizer.json"
    if tokenizer.exists():
        file_in_folder(path, tokenizer.name)  # refuses a link that leaves the folder

    def with_hf_model(recipe: Config) -> Config:
        data = replace(recipe.data, tokenizer=str(tokenizer)) if tokenizer.exists() else recipe.data
        return replace(recipe, name=path.resolve().name, model=described.model, data=data)

    return with_hf_model


def checked_collectives(config: Config, world: World) -> AbstractContextManager[None]:
    from moefold.comm.check_collectives import checked_collectives

    wanted = config.observe.check_collectives and world.store is not None
    return checked_collectives(world.store, world.rank) if wanted else nullcontext()  # pyright: ignore[reportArgumentType]


def rank_arguments(options: TrainOptions, overrides: Sequence[str], out: Path) -> list[str]:
    """The same command for one rank, with the folder settled so that all ranks agree on it."""
    resume = ["--resume", options.resume] if options.resume else []
    from_hf = ["--from-hf", str(options.from_hf)] if options.from_hf else []
    return ["train", options.recipe, "--out", str(out), *resume, *from_hf, *overrides]
