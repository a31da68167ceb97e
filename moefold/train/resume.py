"""Saving and resuming a run: a resumed run continues bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

from moefold.checkpoint.format.retention import RetentionPolicy, retire_later_checkpoints
from moefold.checkpoint.format.storage import StoragePath, parse_storage_path
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.load import FoundCheckpoint, find_checkpoint, load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import (
    LogicalTensor,
    collect_tensors,
    restore_rng_state,
    rng_state_tensors,
)
from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.config.errors import UserError
from moefold.config.keys import format_value, iterate_keys
from moefold.config.renamed_keys import with_new_names
from moefold.observe.printer import Printer
from moefold.train.assemble import Run

FIXED_SETTINGS = ("model.", "train.precision")  # another value would be another model
NOTED_SETTINGS = ("data.", "optim.", "train.seed", "train.global_batch")  # a changed value is printed


def checkpoint_folder(run: Run) -> StoragePath:
    """The folder of a run's checkpoints."""
    path = run.config.checkpoint.path
    if path:
        return parse_storage_path(path)
    return run.out / "checkpoints"


def make_background_saver(run: Run, say: Printer) -> BackgroundSaver:
    """The saver of a run. From now on, updates wait until the copy of a save in progress is done."""
    config = run.config.checkpoint
    keep = RetentionPolicy(config.keep, config.keep_every)
    folder = checkpoint_folder(run)
    saver = BackgroundSaver(folder, keep, run.world, say)
    run.before_update = saver.wait_for_copy
    return saver


def begin_checkpoint(run: Run, saver: BackgroundSaver) -> None:
    """Begin a checkpoint of the run as it is now."""
    tensors = run_tensors(run)
    tensors |= rng_state_tensors(run.world)
    state = {
        "step": run.step,
        "consumed": run.loader.consumed,
        "config": flat_settings(run),
    }
    saver.begin_save(run.step, tensors, state)


def run_tensors(run: Run) -> dict[str, LogicalTensor]:
    return collect_tensors(run.model, run.optimizer, run.further_state)


def flat_settings(run: Run) -> dict[str, Any]:
    keys = iterate_keys(run.config)
    return {key.path: key.default for key in keys}


def resume_run(run: Run, source: str, say: Printer) -> bool:
    """Load a checkpoint. `auto`: the newest intact one of this run, if there is any; else the one at the path
    `source`. Returns whether the run continues."""
    own = checkpoint_folder(run)
    if source == "auto":
        found = find_checkpoint(own, run.world, say)
    else:
        named = parse_storage_path(source)
        found = require_checkpoint(named, run.world, say)
    if found is None:
        say(f"no checkpoint in {own} yet; starting from step 0")
        return False
    compare_settings(run, found, say)
    # Ranks that the saving run did not have keep their own random state.
    rng_state = rng_state_tensors(run.world)
    tensors = run_tensors(run) | rng_state
    load_checkpoint(found, tensors, optional=set(rng_state), world=run.world)
    restore_rng_state(rng_state, run.world)
    # Checkpoints of the abandoned continuation must not be found by the next --resume auto.
    step = found.state["step"]
    is_own = found.path.parent.resolve() == own.resolve()
    last_kept = step if is_own else -1  # a run that continues another one keeps none of its own checkpoints
    retire = partial(retire_later_checkpoints, own, last_kept)
    run_on_rank_zero(retire, run.world, own)
    run.step = step
    run.loader.consumed = found.state["consumed"]
    say(f"resumed from {found.path} at step {run.step}")
    return True


def compare_settings(run: Run, found: FoundCheckpoint, say: Printer) -> None:
    """Refuse changes of settings that are fixed during a run, and print the other changes that affect the result."""
    differences = changed_settings(run, found)
    refused: list[str] = []
    for key, text in differences.items():
        if key.startswith(FIXED_SETTINGS):
            refused.append(f"{text}; set it back")
    if refused:
        raise UserError(f"{found.path} belongs to another configuration:", *refused)
    for key, text in differences.items():
        if key.startswith(NOTED_SETTINGS):
            say(f"note: {text}")


def changed_settings(run: Run, found: FoundCheckpoint) -> dict[str, str]:
    """A text for every setting that differs from the checkpoint's."""
    saved, _ = with_new_names(found.state["config"])
    differences: dict[str, str] = {}
    for key, value in flat_settings(run).items():
        if key not in saved:
            continue
        new = show_setting(value)
        old = show_setting(saved[key])
        if new != old:
            differences[key] = f"{key} = {new}, but the checkpoint has {old}"
    return differences


def show_setting(value: Any) -> str:
    if isinstance(value, list):  # JSON has no tuples
        value = tuple(value)
    return format_value(value)
