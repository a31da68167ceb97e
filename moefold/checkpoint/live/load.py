"""Find the newest whole checkpoint and load it into the tensors of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moefold.checkpoint.format.ledger import Ledger, TensorSpec
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.retention import checkpoints_at
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.format.verify import OpenedCheckpoint, hash_stored_pieces, open_checkpoint, verify_checkpoint
from moefold.checkpoint.live.logical_tensors import LogicalTensors, TensorPart, as_tensor_part
from moefold.checkpoint.live.save import run_on_every_rank, run_on_rank_zero
from moefold.checkpoint.live.saved_model import read_tensor_box
from moefold.comm.collectives import all_gather_objects
from moefold.config.errors import UserError, did_you_mean
from moefold.layout.axes import World

TOLD_PROBLEMS = 3  # problems of one checkpoint that are told when it is passed over; `moefold ckpt verify` tells all


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that passed verification."""

    opened: OpenedCheckpoint

    @property
    def path(self) -> StoragePath:
        return self.opened.path

    @property
    def state(self) -> dict[str, Any]:
        return self.opened.state


def find_checkpoint(place: StoragePath, world: World, say: Callable[[str], None]) -> FoundCheckpoint | None:
    """The newest whole checkpoint at `place`: a checkpoint itself, a folder of them, or a run. Damaged ones are
    passed over with a message. None if there is no trace of any; a refusal if all are damaged."""
    damaged: list[str] = []
    for path in run_on_rank_zero(lambda: checkpoints_at(place), world, place):
        try:
            return FoundCheckpoint(verify_together(path, world))
        except DamagedCheckpoint as damage:
            told, more = damage.problems[:TOLD_PROBLEMS], len(damage.problems) - TOLD_PROBLEMS
            damaged.append(f"{path} is damaged: {'; '.join(told)}{f'; and {more} more' if more > 0 else ''}")
            if world.rank == 0:
                say(f"{damaged[-1]}; trying the one before")
    if damaged:
        raise UserError(
            *damaged, f"no whole checkpoint is left in {place}; restore one, or start anew without --resume"
        )
    return None


def verify_together(path: StoragePath, world: World) -> OpenedCheckpoint:
    """As `verify`, each rank hashing its share of the values."""
    opened = run_on_rank_zero(lambda: open_checkpoint(path), world, path)
    shares = run_on_every_rank(lambda: hash_stored_pieces(opened, opened.work()[world.rank :: world.size]), world, path)
    opened.raise_if_damaged({piece: found for share in shares for piece, found in share.items()})
    return opened


def require_checkpoint(place: StoragePath, world: World, say: Callable[[str], None]) -> FoundCheckpoint:
    """As `find`, where the user named the place: nothing there is a refusal."""
    found = find_checkpoint(place, world, say)
    if found is None:
        raise UserError(run_on_rank_zero(lambda: explain_no_checkpoint(place), world, place))
    return found


def explain_no_checkpoint(place: StoragePath) -> str:
    if not place.exists():
        return f"--resume {place}: no such folder; expected a run, its checkpoints folder, or one checkpoint"
    try:
        verify_checkpoint(place)
    except DamagedCheckpoint as problem:
        return (
            f"--resume {place} is no moefold checkpoint: {problem}; expected a run or a checkpoint that moefold wrote"
        )
    return f"--resume {place}: no checkpoint there"


def load_checkpoint(found: FoundCheckpoint, tensors: LogicalTensors, optional: set[str], world: World) -> None:
    """Fill the tensors in place. All that is missing, left over, or of another shape or dtype is refused together.
    `optional` names may be absent from the checkpoint (then the tensor stays as it is)."""
    ledger = found.opened.ledger
    wanted = {name: as_tensor_part(t) for name, t in tensors.items() if name in ledger or name not in optional}
    held = set[str]().union(*all_gather_objects(set(wanted), world.everyone))  # by some rank: a pipeline's hold others
    problems = next(
        filter(None, all_gather_objects(spec_mismatches(ledger, tensor_specs(wanted), held), world.everyone)),
        None,
    )
    if problems:  # on any rank: then none may wait for it in the load
        raise UserError(f"{found.path} does not fit this configuration:", *problems)
    try:
        run_on_every_rank(lambda: fill_held_boxes(found.opened, wanted), world, found.path)
    except DamagedCheckpoint as problem:
        raise UserError(f"{found.path} cannot be read: {problem}") from None


def fill_held_boxes(opened: OpenedCheckpoint, wanted: Mapping[str, TensorPart]) -> None:
    """Read this rank's boxes and no more."""
    reader = opened.box_reader()
    for name, part in wanted.items():
        for held in part.held:
            held.write(read_tensor_box(reader, name, held.box))


def tensor_specs(parts: Mapping[str, TensorPart]) -> dict[str, TensorSpec]:
    return {name: part.what for name, part in parts.items()}


def spec_mismatches(ledger: Ledger, wanted: Mapping[str, TensorSpec], held: set[str], most: int = 20) -> list[str]:
    """Every difference in names, shapes and dtypes, the first few in full. `held` are the names that any rank has."""
    found = [f'"{n}" is not in the checkpoint{did_you_mean(n, ledger)}' for n in sorted(wanted.keys() - ledger.keys())]
    extra = sorted(n for n in ledger.keys() - held if not n.startswith("random."))
    found += [f'"{n}" is in the checkpoint, but the model has no such tensor' for n in extra]
    for name in sorted(wanted.keys() & ledger.keys()):
        here, there = wanted[name], ledger[name].what
        if here[:2] != there[:2]:
            found.append(f'"{name}" is {there} in the checkpoint; the model expects {here}')
    return found if len(found) <= most else [*found[:most], f"and {len(found) - most} more"]
