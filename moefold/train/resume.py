"""Save a run and take it up again where it was, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moefold.checkpoint.load import Found, find, load, require
from moefold.checkpoint.place import Place, place_of
from moefold.checkpoint.save import agreed
from moefold.checkpoint.saver import Saver
from moefold.checkpoint.shelf import Keep, set_aside_after
from moefold.checkpoint.state import random_state, restore_random, tensors_of
from moefold.config.keys import keys_of, show
from moefold.config.refused import Refused
from moefold.train.assemble import Run

# Changing these between sessions would continue another model, or pretend to.
FIXED = ("model.", "train.precision")


def shelf_of(run: Run) -> Place:
    """Where a run's checkpoints lie."""
    return place_of(run.config.checkpoint.path) if run.config.checkpoint.path else run.out / "checkpoints"


def saver_of(run: Run, say: Callable[[str], None]) -> Saver:
    """Saves the run beside its steps. Updates wait for copies from now on."""
    c = run.config.checkpoint
    saver = Saver(shelf_of(run), Keep(c.keep, c.keep_every), run.world, say)
    run.before_update = saver.await_copy
    return saver


def save_run(run: Run, saver: Saver) -> None:
    """Begin a checkpoint of the run as it is now."""
    tensors = tensors_of(run.model, run.optimizer) | random_state(run.world)
    saver.save(run.step, tensors, {"step": run.step, "consumed": run.loader.consumed, "config": settings(run)})


def settings(run: Run) -> dict[str, Any]:
    return {key.path: key.default for key in keys_of(run.config)}


def resume_run(run: Run, where: str, say: Callable[[str], None]) -> bool:
    """`auto`: the newest whole checkpoint of this run, if there is one; else the one at the given place.
    Returns whether the run continues."""
    own = shelf_of(run)
    found = find(own, run.world, say) if where == "auto" else require(place_of(where), run.world, say)
    if found is None:
        say(f"no checkpoint in {own} yet; starting from step 0")
        return False
    compare_settings(run, found, say)
    randoms = random_state(run.world)
    load(found, tensors_of(run.model, run.optimizer) | randoms, optional=set(randoms), world=run.world)
    restore_random(randoms, run.world)
    left_behind = found.state["step"] if found.path.parent.resolve() == own.resolve() else -1
    agreed(lambda: set_aside_after(own, left_behind), run.world, own)
    run.step, run.loader.consumed = found.state["step"], found.state["consumed"]
    say(f"resumed from {found.path} at step {run.step}")
    return True


def compare_settings(run: Run, found: Found, say: Callable[[str], None]) -> None:
    """Refuse what cannot change between sessions, and tell what did."""
    before, now = found.state["config"], settings(run)
    changed = {k: before[k] for k in now if k in before and show_any(before[k]) != show_any(now[k])}
    texts = {k: f"{k} = {show_any(now[k])}, but the checkpoint has {show_any(old)}" for k, old in changed.items()}
    if refused := [f"{text}; set it back" for key, text in texts.items() if key.startswith(FIXED)]:
        raise Refused(f"{found.path} belongs to another configuration:", *refused)
    for key, text in texts.items():
        if key.startswith(("data.", "optim.", "train.seed", "train.global_batch")):
            say(f"note: {text}")


def show_any(value: Any) -> str:
    return show(tuple(value) if isinstance(value, list) else value)
