"""`moefold train`: all checks that need no torch, then training, in this process or on several local ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from moefold.cli.memory_errors import is_out_of_memory
from moefold.cli.out_of_memory import OutOfMemory
from moefold.config.errors import UserError
from moefold.config.run import TRAINED, Config
from moefold.layout.environment import Rendezvous, read_environment
from moefold.layout.spawn import RanksEnd, StartRank, launch_local_ranks, way_to_start
from moefold.plan.memory.fit_proposals import misfit_problems
from moefold.plan.memory.save_window import with_save_window
from moefold.plan.time.run_context import with_expected_context
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import check_rank_count, read_options
from moefold.presets.recipe import resolve_recipe, unsaid_settings
from moefold.watch.guard import RankGuard, guarded_rank
from moefold.watch.stop_requests import StopRequest
from moefold.watch.supervisor import Supervisor
from moefold.watch.time_limits import TimeLimits

if TYPE_CHECKING:
    from moefold.layout.axes import World

LATER_THAN_WATCH = 60.0  # seconds


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
    """auto: continue the run in --out if it has a checkpoint. A path: continue from the checkpoint there."""
    init_from: str | None = None
    """A run or checkpoint whose weights alone to start from: step, optimizer and data position are new."""
    lora_from: Path | None = None
    """A folder of adapters, as PEFT saves them, to start from: its ranks, scales and targets are those of `lora`."""
    nproc: int = 1
    """How many ranks to start on this machine."""
    port: int | None = None
    """Rendezvous port of the ranks of --nproc; by default a free port."""
    restarts: int = 0
    """How often to start the run again after a fault, from its newest sound checkpoint."""
    force: bool = False
    """Start even where the planner finds that the run cannot fit this machine's memory."""


FORM = CommandForm("train", TrainOptions, config_keys=True)


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(FORM, argv)
    refuse_two_starts(options)
    rendezvous = read_environment(os.environ)
    refuse_restarts(options, rendezvous)
    starts_ranks = "RANK" not in os.environ and (options.nproc != 1 or options.restarts > 0)
    if starts_ranks:
        ranks = check_rank_count(options.nproc)
        rendezvous = Rendezvous(size=ranks, local_size=ranks)
    change = change_from_start(options, overrides)
    config = resolve_recipe(options.recipe, overrides, rendezvous.size, change)
    refuse_other_vocabulary(options, config)
    problems = unsaid_settings(options.recipe, overrides)
    if not options.force:
        planned = with_expected_context(config, rendezvous.size, rendezvous.local_size)
        problems += misfit_problems(planned, rendezvous)
    if problems:
        raise UserError(*problems)
    out = options.out or default_run_folder(config)
    if starts_ranks:
        with way_to_start() as start_rank:
            launch = partial(launch_ranks, options, overrides, out, start_rank)
            if not options.restarts:
                return launch(options.resume).code
            choose = partial(checkpoint_to_resume, config, options, out)
            return Supervisor(launch, choose, out, options.restarts).run(options.resume)
    try:
        return train_on_this_rank(config, options, out)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(config, rendezvous, error) from error


def refuse_restarts(options: TrainOptions, rendezvous: Rendezvous) -> None:
    if options.restarts < 0:
        raise UserError(f"--restarts {options.restarts} is no number of restarts; expected 0 or more")
    if options.restarts and ("RANK" in os.environ or rendezvous.size > 1):
        raise UserError(
            f"--restarts {options.restarts}, but this rank was started by another launcher; expected ranks of --nproc; "
            "set torchrun's --max-restarts, or let Slurm requeue the job"
        )


def launch_ranks(
    options: TrainOptions, overrides: Sequence[str], out: Path, start_rank: StartRank, resume: str | None
) -> RanksEnd:
    """Start the ranks of --nproc, and wait for them."""
    resumed = replace(options, resume=resume)
    arguments = rank_arguments(resumed, overrides, out)
    return launch_local_ranks(arguments, options.nproc, options.port, serve_store, start_rank)


def checkpoint_to_resume(config: Config, options: TrainOptions, out: Path, looks_inside: bool) -> str | None:
    """What a restarted run resumes: its newest checkpoint, or what it was first started from. If checkpoints may hold
    wrong values, the newest that is intact and finite, in memory or on the disk; None where none of several is."""
    from moefold.checkpoint.format.retention import checkpoints_at
    from moefold.checkpoint.format.sound import newest_sound
    from moefold.checkpoint.format.storage import checkpoint_folder
    from moefold.checkpoint.keeper.kept_state import keeps_sound_state

    folder = checkpoint_folder(config, out)
    if looks_inside and config.checkpoint.memory_every and keeps_sound_state(out, folder):
        return "auto"
    if not checkpoints_at(folder):
        return options.resume or "auto"
    if not looks_inside:
        return "auto"
    sound = newest_sound(folder)
    return None if sound is None else str(sound)


def serve_store(listener: socket.socket) -> object:
    from moefold.layout import process_groups  # torch

    return process_groups.serve_store(listener)


def refuse_two_starts(options: TrainOptions) -> None:
    if options.init_from is None:
        return
    if options.from_hf:
        raise UserError("--init-from and --from-hf both name weights to start from; give one of them")
    if options.resume not in (None, "auto"):
        raise UserError(
            f"--init-from and --resume {options.resume} both name a checkpoint to start from; give one of them, "
            "or --resume auto, which continues the run in --out where it has a checkpoint"
        )


def refuse_other_vocabulary(options: TrainOptions, config: Config) -> None:
    if options.from_hf and config.data.tokenizer == TRAINED:
        raise UserError(
            f"data.tokenizer = trained, but the weights of --from-hf {options.from_hf} belong to a vocabulary of their "
            "own; set data.tokenizer to its tokenizer.json"
        )


def default_run_folder(config: Config) -> Path:
    """A folder that is not there yet: runs that begin in the same second are numbered."""
    now = time.strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{config.name}-{now}"
    others = (first.with_name(f"{first.name}-{number}") for number in count(2))
    folders = chain([first], others)
    return next(folder for folder in folders if not folder.exists())


def train_on_this_rank(config: Config, options: TrainOptions, out: Path) -> int:
    """Train on this rank; the exit code: 0 or that of the request which ended the run before its last step."""
    with guarded_rank() as guard:
        request = train_guarded(config, options, out, guard)
    return request.exit_code if request else 0


def train_guarded(config: Config, options: TrainOptions, out: Path, guard: RankGuard) -> StopRequest | None:
    from moefold.comm.host_objects import broadcast_object, first_object  # torch, from here on
    from moefold.layout.agreement import code_versions, comparable_settings
    from moefold.layout.numa import bind_to_gpu_node
    from moefold.layout.process_groups import joined_world
    from moefold.train.loop import RunStart, run_training
    from moefold.watch.hang_watch import HangWatch

    place = read_environment(os.environ)
    limits = TimeLimits(config.train.step_timeout, config.train.slow_timeout)
    watch = HangWatch(limits, place, out)
    guard.looks.append(watch.look)
    start = RunStart(options.resume, options.from_hf, options.init_from, options.lora_from)
    terms = compared_options(options) | comparable_settings(config) | code_versions()
    timeout = collective_timeout(config)
    with joined_world(config.parallel, config.train.device, config.shard, terms, timeout) as world:
        if config.train.bind_numa:
            bind_to_gpu_node(world.device)
        # The default folder's name holds the time, which may differ between ranks: rank 0's counts.
        folder = broadcast_object(str(out), world.everyone)
        watch.run_folder = Path(folder)
        with collectives_check(config, world):
            fitted = with_save_window(config, place)
            request = run_training(fitted, world, Path(folder), start, guard)
        watch.end()
        first_object(None, world.everyone)  # all ranks are here: rank 0 may take the store with it
        return request


def collective_timeout(config: Config) -> timedelta:
    """Torch's own timeout of a collective: later than the watch, which can say more."""
    return timedelta(seconds=config.train.slow_timeout + LATER_THAN_WATCH)


def compared_options(options: TrainOptions) -> dict[str, str]:
    """The options that must be the same on all ranks. Folders are compared by their absolute paths."""
    values = {
        "--out": options.out,
        "--resume": options.resume,
        "--from-hf": options.from_hf,
        "--init-from": options.init_from,
        "--lora-from": options.lora_from,
    }
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Path):
            value = value.absolute()
        texts[name] = "not given" if value is None else str(value)
    return texts


def change_from_start(options: TrainOptions, overrides: Sequence[str]) -> Callable[[Config], Config]:
    """A function that puts the model and tokenizer of a Hugging Face folder, and the section `lora` of a folder of
    adapters for the model with its overrides, into a recipe."""
    change = change_from_hf(options.from_hf)
    if options.lora_from is None:
        return change

    from moefold.checkpoint.hf.adapted_products import lora_of_folder
    from moefold.checkpoint.hf.adapter_folder import open_adapter_folder

    folder = open_adapter_folder(options.lora_from)
    without_lora = resolve_recipe(options.recipe, overrides, None, change)
    lora = lora_of_folder(folder, without_lora.model)
    return lambda recipe: replace(change(recipe), lora=lora)


def change_from_hf(path: Path | None) -> Callable[[Config], Config]:
    """A function that puts a Hugging Face folder's model and tokenizer into a recipe. The folder is read without
    torch, so that unsupported options are refused at once."""
    if path is None:
        return unchanged_recipe

    from moefold.checkpoint.hf.config_json import describe_model
    from moefold.checkpoint.hf.model_folder import file_in_folder, open_model_folder

    described = describe_model(open_model_folder(path))
    tokenizer = path / "tokenizer.json"
    has_tokenizer = tokenizer.exists()
    if has_tokenizer:
        file_in_folder(path, tokenizer.name)  # refuses a link that leaves the folder

    def with_hf_model(recipe: Config) -> Config:
        data = recipe.data
        if has_tokenizer:
            data = replace(data, tokenizer=str(tokenizer))
        name = path.resolve().name
        model = described.model
        return replace(recipe, name=name, model=model, data=data)

    return with_hf_model


def unchanged_recipe(recipe: Config) -> Config:
    return recipe


def collectives_check(config: Config, world: World) -> AbstractContextManager[None]:
    from moefold.comm.check_collectives import checked_collectives

    if not config.observe.check_collectives or world.store is None:
        return nullcontext()
    return checked_collectives(world.store, world.rank)


def rank_arguments(options: TrainOptions, overrides: Sequence[str], out: Path) -> list[str]:
    """The command line of one rank, with the folder fixed so that all ranks use the same. The memory of all ranks
    together was checked before they are started."""
    arguments = ["train", options.recipe, "--out", str(out), "--force"]
    if options.resume:
        arguments += ["--resume", options.resume]
    if options.from_hf:
        arguments += ["--from-hf", str(options.from_hf)]
    if options.init_from:
        arguments += ["--init-from", options.init_from]
    if options.lora_from:
        arguments += ["--lora-from", str(options.lora_from)]
    return [*arguments, *overrides]
