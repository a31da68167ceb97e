"""Saving and resuming a run: a resumed run continues bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from torch import Tensor

from moefold.checkpoint.format.retention import RetentionPolicy, retire_later_checkpoints
from moefold.checkpoint.format.storage import checkpoint_folder, parse_storage_path
from moefold.checkpoint.format.verify import BEGUN_AFTER, OpenedCheckpoint
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.changed_states import ChangedStates, compare_states
from moefold.checkpoint.live.load import OPTIONAL_PREFIXES, find_checkpoint, load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import (
    LogicalTensor,
    collect_tensors,
    restore_rng_state,
    rng_state_tensors,
)
from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.comm.host_objects import union_of_sets
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.layout.axes import World
from moefold.observe.printer import Printer
from moefold.train.assemble import Run
from moefold.train.changed_settings import (
    accept_changes,
    changed_settings,
    flat_settings,
    has_other_rules,
    record_changes,
    require_run_state,
)

GIB = 2**30


def make_background_saver(run: Run, say: Printer) -> BackgroundSaver:
    """The saver of a run. From now on, updates wait until the copy of a save in progress is done."""
    config = run.config.checkpoint
    keep = RetentionPolicy(config.keep, config.keep_every)
    folder = checkpoint_folder(run.config, run.out)
    saver = BackgroundSaver(folder, keep, run.world, say, window_of_rank(run))
    run.before_update = saver.wait_for_copy
    return saver


def window_of_rank(run: Run) -> int | None:
    """Host memory that a rank's file may take, in bytes; None where it may take all that it needs."""
    of_node = run.config.checkpoint.host_gib * GIB
    return ceil(of_node / run.world.node_size) or None


def with_common_window(config: Config, world: World) -> Config:
    """The configuration with the window that the machine of one rank needs, if any, on all ranks: machines may have
    other memory, and pipeline ranks other files."""
    own = config.checkpoint.host_gib
    largest = max(union_of_sets({own}, world.everyone))
    checkpoint = replace(config.checkpoint, host_gib=largest)
    return replace(config, checkpoint=checkpoint)


def begin_checkpoint(run: Run, saver: BackgroundSaver) -> None:
    """Begin a checkpoint of the run as it is now."""
    tensors = run_tensors(run)
    tensors |= rng_state_tensors(run.world)
    state: dict[str, Any] = {
        "step": run.step,
        "consumed": run.loader.consumed,
        "sources": run.loader.sequences.source_counts(run.loader.consumed),
        "config": flat_settings(run.config),
        BEGUN_AFTER: run.optimizer.begun_after,
    }
    packed = run.loader.packed
    if packed is not None:
        state["packing"] = packed.packing_state(run.loader.consumed)
    saver.begin_save(run.step, tensors, state)


def run_tensors(run: Run) -> dict[str, LogicalTensor]:
    return collect_tensors(run.model, run.optimizer, run.further_state)


def refuse_other_mixture(run: Run, found: OpenedCheckpoint) -> None:
    """Refuse a mixture that would have taken other sequences from prepared sources so far: some would be repeated, and
    others never seen."""
    saved: dict[str, int] = found.state.get("sources", {})
    now = run.loader.sequences.source_counts(found.state["consumed"])
    given_before = {digest: count for digest, count in saved.items() if count}
    given_now = {digest: count for digest, count in now.items() if count}
    if saved and now and given_before != given_now:
        step = found.state["step"]
        raise UserError(
            f"data.files, data.weights and train.global_batch give other sequences up to step {step} than {found.path} "
            f"has seen; keep data.weights as they were and add those from step {step} on, such as "
            f"0.7/0.3,{step}:0.5/0.5; a new folder has weight 0 before"
        )


def restore_packing(run: Run, found: OpenedCheckpoint) -> None:
    """Go on with the samples that wait in a checkpoint. Refuse one of a run whose samples were not packed, or packed
    where these are not: some would be repeated, and others never seen."""
    packed = run.loader.packed
    saved = found.state.get("packing")
    if (packed is None) != (saved is None):
        before = "windows" if saved is None else "packed documents"
        raise UserError(
            f"data.packing = {run.config.data.packing}, but {found.path} has read {before}; keep data.packing as it "
            f"was, or start a new run with its weights: --init-from {found.path}"
        )
    if packed is not None and saved is not None:
        packed.restore(found.state["consumed"], saved)


def load_tensors(run: Run, found: OpenedCheckpoint, rng_state: dict[str, Tensor], say: Printer) -> None:
    """Fill all tensors of a run. With other rules than the checkpoint's, states whose kinds it lacks begin anew."""
    tensors = run_tensors(run) | rng_state
    optional = {name for name in tensors if name.startswith(OPTIONAL_PREFIXES)}
    states = ChangedStates()
    if has_other_rules(run.config, found):
        states = compare_states(found.ledger, tensors, run.world)
    for note in states.notes():
        say(note)
    taken = states.taken_over(tensors)
    load_checkpoint(found, taken, optional, run.world, states.left)
    run.loss_scale.forget_counts()
    next_step = found.state["step"] + 1
    next_update = run.loss_scale.update_number(next_step)
    begun_after = states.begun_after(found, next_update.highest - 1)
    run.optimizer.note_begins(begun_after)


def resume_run(run: Run, source: str, say: Printer, kept: OpenedCheckpoint | None = None) -> bool:
    """Load a checkpoint: the one that was kept in memory; else, for `auto`, the newest intact one of this run, if there
    is any; else the one at the path `source`. Returns whether the run continues."""
    own = checkpoint_folder(run.config, run.out)
    if kept is not None:
        found = kept
    elif source == "auto":
        found = find_checkpoint(own, run.world, say)
    else:
        named = parse_storage_path(source)
        found = require_checkpoint(named, run.world, say)
    if found is None:
        say(f"no checkpoint in {own} yet; starting from step 0")
        return False
    require_run_state(found)
    changes = list(changed_settings(run.config, found))
    accept_changes(changes, found, say)
    refuse_other_mixture(run, found)
    restore_packing(run, found)
    # Ranks that the saving run did not have keep their own random state; recipes may have changed.
    rng_state = rng_state_tensors(run.world)
    load_tensors(run, found, rng_state, say)
    run.parameters.publish()
    if run.graph is not None:
        run.graph.forget()
    if run.static_graphs is not None:
        run.static_graphs.forget()
    restore_rng_state(rng_state, run.world)
    # Checkpoints of the abandoned continuation must not be found by the next --resume auto.
    step = found.state["step"]
    parent = found.path.parent
    is_own = kept is not None or parent.resolve() == own.resolve()
    last_kept = step if is_own else -1  # a run that continues another one keeps none of its own checkpoints
    retire = partial(retire_later_checkpoints, own, last_kept)
    run_on_rank_zero(retire, run.world, own)
    record = partial(record_changes, run.out, step, found.path, changes)
    run_on_rank_zero(record, run.world, run.out)
    run.step = step
    run.loader.consumed = found.state["consumed"]
    say(f"resumed from {found.path} at step {run.step}")
    return True
