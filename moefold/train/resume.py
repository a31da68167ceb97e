"""Save a run and take it up again where it was, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moefold.checkpoint.load import Found, find, load, require
from moefold.checkpoint.save import agreed, save, set_aside_after
from moefold.checkpoint.state import random_state, restore_random, tensors_of
from moefold.config.keys import keys_of, show
from moefold.config.refused import Refused
from moefold.train.assemble import Run

# Changing these between sessions would continue another model, or pretend to.
FIXED = ("model.", "train.precision")


def save_run(run: Run) -> Path:
    tensors = tensors_of(run.model, run.optimizer) | random_state(run.world)
    state = {"step": run.step, "consumed": run.loader.consumed, "config": settings(run)}
    return save(run.out / "checkpoints", run.step, tensors, state, run.config.checkpoint.keep, run.world)


def settings(run: Run) -> dict[str, Any]:
    return {key.path: key.default for key in keys_of(run.config)}


def resume_run(run: Run, where: str, say: Callable[[str], None]) -> bool:
    """`auto`: the newest whole checkpoint of this run's folder, if there is one; else the one at the given place.
    Returns whether the run continues."""
    if where == "auto":
        found = find(run.out, run.world, say)
    else:
        found = require(Path(where), run.world, say)
    if found is None:
        say(f"no checkpoint in {run.out / 'checkpoints'} yet; starting from step 0")
        return False
    compare_settings(run, found, say)
    randoms = random_state(run.world)
    load(found, tensors_of(run.model, run.optimizer) | randoms, optional=set(randoms), world=run.world)
    restore_random(randoms, run.world)
    own = run.out / "checkpoints"
    left_behind = found.state["step"] if found.path.parent.resolve() == own.resolve() else -1
    agreed(lambda: set_aside_after(own, left_behind), run.world, run.out)
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
