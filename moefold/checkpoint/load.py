"""Find the newest whole checkpoint and load it into the tensors of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from moefold.checkpoint.manifest import MANIFEST, STATE, Damaged, verify
from moefold.checkpoint.save import agreed, committed, explained, quiet_about_one_process
from moefold.checkpoint.storage import SafeReader, read_table
from moefold.comm.collectives import gather_objects
from moefold.config.refused import Refused, did_you_mean
from moefold.layout.axes import World


@dataclass(frozen=True)
class Found:
    """A checkpoint that passed verification."""

    path: Path
    state: dict[str, Any]


def find(place: Path, world: World, say: Callable[[str], None]) -> Found | None:
    """The newest whole checkpoint at `place`: a checkpoint itself, a folder of them, or a run. Damaged ones are
    passed over with a message. None if there is no trace of any; a refusal if all are damaged."""
    path = agreed(lambda: newest_whole(place, say), world, place)
    return Found(path, json.loads((path / STATE).read_text())) if path else None


def candidates(place: Path) -> list[Path]:
    for folder in (place / "checkpoints", place):
        if inside := committed(folder):
            return inside
    return [place] if (place / MANIFEST).exists() or (place / STATE).exists() else []


def newest_whole(place: Path, say: Callable[[str], None]) -> Path | None:
    damaged: list[str] = []
    for path in candidates(place):
        try:
            verify(path)
        except Damaged as problem:
            damaged.append(f"{path} is damaged: {problem}")
            say(f"{damaged[-1]}; trying the one before")
            continue
        return path
    if damaged:
        raise Refused(*damaged, f"no whole checkpoint is left in {place}; restore one, or start anew without --resume")
    return None


def require(place: Path, world: World, say: Callable[[str], None]) -> Found:
    """As `find`, where the user named the place: nothing there is a refusal."""
    found = find(place, world, say)
    if found is None:
        raise Refused(agreed(lambda: why_not(place), world, place))
    return found


def why_not(place: Path) -> str:
    if not place.exists():
        return f"--resume {place}: no such folder; expected a run, its checkpoints folder, or one checkpoint"
    try:
        verify(place)
    except Damaged as problem:
        return (
            f"--resume {place} is no moefold checkpoint: {problem}; expected a run or a checkpoint that moefold wrote"
        )
    return f"--resume {place}: no checkpoint there"


def load(found: Found, tensors: dict[str, torch.Tensor], optional: set[str], world: World) -> None:
    """Fill the tensors in place. All that is missing, left over, or of another shape or dtype is refused together.
    `optional` names may be absent from the checkpoint (then the tensor stays as it is)."""
    table = read_table(found.path)
    wanted = {name: t for name, t in tensors.items() if name in table or name not in optional}
    held = set[str]().union(*gather_objects(set(wanted), world.everyone))  # by some rank: a pipeline's hold others
    problems = next(filter(None, gather_objects(mismatches(table, wanted, held), world.everyone)), None)
    if problems:  # on any rank: then none may wait for it in the load
        raise Refused(f"{found.path} does not fit this configuration:", *problems)
    try:
        with quiet_about_one_process():
            dcp.load(
                wanted,  # pyright: ignore[reportArgumentType]
                storage_reader=SafeReader(found.path),
                no_dist=world.size == 1,
                process_group=world.everyone.group,
            )
    except CheckpointException as error:
        raise explained(error, found.path) from None


def mismatches(table: dict[str, Any], wanted: dict[str, torch.Tensor], held: set[str], most: int = 20) -> list[str]:
    """Every difference in names, shapes and dtypes, the first few in full. `held` are the names that any rank has."""
    found = [f'"{n}" is not in the checkpoint{did_you_mean(n, table)}' for n in sorted(wanted.keys() - table.keys())]
    extra = sorted(n for n in table.keys() - held if not n.startswith("random."))
    found += [f'"{n}" is in the checkpoint, but the model has no such tensor' for n in extra]
    for name in sorted(wanted.keys() & table.keys()):
        here = (str(wanted[name].dtype).removeprefix("torch."), list(wanted[name].shape))
        there = (table[name]["dtype"], table[name]["shape"])
        if here != there:
            found.append(f'"{name}" is {there[0]} {there[1]} in the checkpoint; the model expects {here[0]} {here[1]}')
    return found if len(found) <= most else [*found[:most], f"and {len(found) - most} more"]
