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

from moefold.cli.options import check_ranks, read
from moefold.config.run import Config
from moefold.layout.place import find_place
from moefold.layout.spawn import run_ranks
from moefold.presets.recipe import resolve

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


def run(argv: Sequence[str]) -> int:
    options, overrides = read(TrainOptions, argv, "train")
    here = find_place(os.environ)
    starts = "RANK" not in os.environ and options.nproc != 1
    world = check_ranks(options.nproc) if starts else here.size
    config = resolve(options.recipe, overrides, world, started_from(options.from_hf))
    out = options.out or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if starts:
        return run_ranks(arguments(options, overrides, out), options.nproc, options.port)

    from moefold.comm.collectives import gather_objects  # torch, from here on
    from moefold.layout.launch import joined
    from moefold.train.loop import train

    with joined(config.parallel, config.train.device) as joint:
        agreed_out = Path(gather_objects(str(out), joint.everyone)[0])  # its default name holds the time
        with collectives_checked(config, joint):
            train(config, joint, agreed_out, options.resume, options.from_hf)
    return 0


def started_from(path: Path | None) -> Callable[[Config], Config]:
    """The recipe with the model and the tokenizer of a folder. Read without torch, so that what is not supported is
    refused at once."""
    if path is None:
        return lambda recipe: recipe

    from moefold.checkpoint.hf.config import describe
    from moefold.checkpoint.hf.folder import inside, open_folder

    described = describe(open_folder(path))
    tokenizer = path / "tokenizer.json"
    if tokenizer.exists():
        inside(path, tokenizer.name)  # refuses a link that leaves the folder

    def change(recipe: Config) -> Config:
        data = replace(recipe.data, tokenizer=str(tokenizer)) if tokenizer.exists() else recipe.data
        return replace(recipe, name=path.resolve().name, model=described.model, data=data)

    return change


def collectives_checked(config: Config, world: World) -> AbstractContextManager[None]:
    from moefold.comm.contract import checked

    wanted = config.observe.check_collectives and world.store is not None
    return checked(world.store, world.rank) if wanted else nullcontext()  # pyright: ignore[reportArgumentType]


def arguments(options: TrainOptions, overrides: Sequence[str], out: Path) -> list[str]:
    """The same command for one rank, with the folder settled so that all ranks agree on it."""
    resume = ["--resume", options.resume] if options.resume else []
    from_hf = ["--from-hf", str(options.from_hf)] if options.from_hf else []
    return ["train", options.recipe, "--out", str(out), *resume, *from_hf, *overrides]
