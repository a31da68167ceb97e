"""Save a run and take it up again where it was, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moefold.checkpoint.format.retention import RetentionPolicy, retire_later_checkpoints
from moefold.checkpoint.format.storage import StoragePath, parse_storage_path
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.load import FoundCheckpoint, find_checkpoint, load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import collect_tensors, restore_rng_state, rng_state_tensors
from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.config.errors import UserError
from moefold.config.keys import format_value, iterate_keys
from moefold.config.renamed_keys import with_new_names
from moefold.train.assemble import Run

# Changing these between sessions would continue another model, or pretend to.
FIXED_SETTINGS = ("model.", "train.precision")


def checkpoint_folder(run: Run) -> StoragePath:
    """Where a run's checkpoints lie."""
    return parse_storage_path(run.config.checkpoint.path) if run.config.checkpoint.path else run.out / "checkpoints"


def make_background_saver(run: Run, say: Callable[[str], None]) -> BackgroundSaver:
    """Saves the run beside its steps. Updates wait for copies from now on."""
    c = run.config.checkpoint
    saver = BackgroundSaver(checkpoint_folder(run), RetentionPolicy(c.keep, c.keep_every), run.world, say)
    run.before_update = saver.wait_for_copy
    return saver


def begin_checkpoint(run: Run, saver: BackgroundSaver) -> None:
    """Begin a checkpoint of the run as it is now."""
    tensors = collect_tensors(run.model, run.optimizer, run.further_state) | rng_state_tensors(run.world)
    saver.save(run.step, tensors, {"step": run.step, "consumed": run.loader.consumed, "config": flat_settings(run)})


def flat_settings(run: Run) -> dict[str, Any]:
    return {key.path: key.default for key in iterate_keys(run.config)}


def resume_run(run: Run, where: str, say: Callable[[str], None]) -> bool:
    """`auto`: the newest whole checkpoint of this run, if there is one; else the one at the given place.
    Returns whether the run continues."""
    own = checkpoint_folder(run)
    found = (
        find_checkpoint(own, run.world, say)
        if where == "auto"
        else require_checkpoint(parse_storage_path(where), run.world, say)
    )
    if found is None:
        say(f"no checkpoint in {own} yet; starting from step 0")
        return False
    compare_settings(run, found, say)
    randoms = rng_state_tensors(run.world)
    tensors = collect_tensors(run.model, run.optimizer, run.further_state)
    load_checkpoint(found, tensors | randoms, optional=set(randoms), world=run.world)
    restore_rng_state(randoms, run.world)
    left_behind = found.state["step"] if found.path.parent.resolve() == own.resolve() else -1
    run_on_rank_zero(lambda: retire_later_checkpoints(own, left_behind), run.world, own)
    run.step, run.loader.consumed = found.state["step"], found.state["consumed"]
    say(f"resumed from {found.path} at step {run.step}")
    return True


def compare_settings(run: Run, found: FoundCheckpoint, say: Callable[[str], None]) -> None:
    """Refuse what cannot change between sessions, and tell what did."""
    before, now = with_new_names(found.state["config"])[0], flat_settings(run)
    changed = {k: before[k] for k in now if k in before and show_setting(before[k]) != show_setting(now[k])}
    texts = {
        k: f"{k} = {show_setting(now[k])}, but the checkpoint has {show_setting(old)}" for k, old in changed.items()
    }
    if refused := [f"{text}; set it back" for key, text in texts.items() if key.startswith(FIXED_SETTINGS)]:
        raise UserError(f"{found.path} belongs to another configuration:", *refused)
    for key, text in texts.items():
        if key.startswith(("data.", "optim.", "train.seed", "train.global_batch")):
            say(f"note: {text}")


def show_setting(value: Any) -> str:
    return format_value(tuple(value) if isinstance(value, list) else value)
