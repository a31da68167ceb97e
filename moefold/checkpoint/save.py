"""Write a checkpoint so that it is either there whole or not there at all.

    step-00000100.tmp/   every rank writes and hashes its file; rank 0 adds ledger, state and manifest; all is synced
    step-00000100/       the rename commits it; `latest` then points here; older ones that are not kept go

A folder is never written twice. Whatever interrupts this, the previous checkpoint stays. `save` does it at once,
checkpoint/saver.py beside the training.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from moefold import __version__
from moefold.checkpoint.image import Digests, Image, Written
from moefold.checkpoint.ledger import entry_of, pieces_of, write_ledger
from moefold.checkpoint.manifest import FORMAT, LEDGER, MANIFEST, STATE, Damaged, seal
from moefold.checkpoint.place import (
    Place,
    free_bytes,
    make_folder,
    move_tree,
    remove_tree,
    sync_folder,
    workplace,
    write_file,
)
from moefold.checkpoint.plan import Plan, share_out
from moefold.checkpoint.reader import Reader, read_index
from moefold.checkpoint.shelf import Keep, folder_of, point_latest_at, prune, set_aside
from moefold.checkpoint.state import Part, Tensors, described
from moefold.checkpoint.verify import verify
from moefold.comm.collectives import gather_objects
from moefold.config.refused import Refused
from moefold.layout.axes import World

SPARE = 1 << 20  # bytes beyond the tensors: ledger, manifest, file headers

T = TypeVar("T")


def save(shelf: Place, step: int, tensors: Tensors, state: dict[str, Any], keep: Keep, world: World) -> Place:
    """Commit a checkpoint of `step` and return its path. Every rank calls this."""
    parts = {name: described(tensor) for name, tensor in tensors.items()}
    plan = plan_of(parts, world)
    image = Image(plan, world.rank, pinned=world.device.type == "cuda")
    image.fill(parts)
    return write_checkpoint(shelf, step, plan, image, state, keep, world)


def plan_of(parts: dict[str, Part], world: World) -> Plan:
    mine = {name: (part.what, [held.box for held in part.held]) for name, part in parts.items()}
    return share_out(gather_objects(mine, world.everyone))


def write_checkpoint(
    shelf: Place, step: int, plan: Plan, image: Image, state: dict[str, Any], keep: Keep, world: World
) -> Place:
    """From filled images to a committed checkpoint. Every rank calls this."""
    final = shelf / folder_of(step)
    folder = workplace(final)
    if agreed(lambda: is_whole(final), world, shelf):
        return final
    agreed(lambda: prepare(folder, plan.bytes + SPARE), world, shelf)
    written = [each for each in together(lambda: image.write(folder), world, shelf) if each]
    digests: Digests = {piece: found for each in written for piece, found in each.digests.items()}
    for found in together(lambda: hash_strays(folder, plan, written, world), world, shelf):
        digests |= found
    agreed(lambda: commit(folder, final, step, state, plan, written, digests, world), world, shelf)
    agreed(lambda: prune(shelf, keep, final), world, shelf)
    return final


def together(work: Callable[[], T], world: World, place: Place) -> list[T]:
    """Every rank does its work and gets what all of them did, or refuses as the first that could not. Nobody is left
    waiting."""
    result, problem = None, None
    try:
        result = work()
    except Exception as error:
        problem = explained(error, place)
    found = gather_objects((result, problem), world.everyone)
    for _, problem in found:
        if problem:
            raise problem
    return [result for result, _ in found]


def agreed(work: Callable[[], T], world: World, place: Place) -> T:
    """Rank 0 does the work; every rank gets its result, or refuses as it did."""
    return together(work if world.rank == 0 else lambda: None, world, place)[0]  # pyright: ignore[reportReturnType]


def hash_strays(folder: Place, plan: Plan, written: list[Written], world: World) -> Digests:
    """This rank's share of the pieces that lie in several files, or not in one run: read back, and hashed."""
    mine = list(plan.strays())[world.rank :: world.size]
    if not mine:
        return {}
    index, _ = read_index(folder, {each.file: each.sha256 for each in written})
    reader = Reader(folder, index, plan.shapes)
    return {(name, piece.first): reader.digest(name, piece) for name, piece in mine}


def bytes_of(tensors: Tensors, world: World) -> int:
    """Bytes of a checkpoint: every logical tensor whole, whatever part of it this rank holds, of all pipeline ranks."""
    here = sum(described(tensor).what.bytes for tensor in tensors.values())
    return sum(gather_objects(here, world.axis("pp"))) + SPARE


def require_space(place: Place, needed: int) -> None:
    """Refuse before writing what cannot fit."""
    has = free_bytes(place)
    if has is not None and has < needed:
        raise Refused(
            f"no space on {place}: a checkpoint needs {needed / 2**20:.1f} MiB, there are {has / 2**20:.1f}; "
            "free some, or choose another place with --out; checkpoints written before are untouched"
        )


def prepare(folder: Place, needed: int) -> None:
    """An empty folder to write in; what an interrupted save left there goes."""
    if folder.exists():
        remove_tree(folder)
    if isinstance(folder, Path):
        folder.parent.mkdir(parents=True, exist_ok=True)
    require_space(folder.parent, needed)
    make_folder(folder)


def commit(
    folder: Place,
    final: Place,
    step: int,
    state: dict[str, Any],
    plan: Plan,
    written: list[Written],
    digests: Digests,
    world: World,
) -> None:
    by_name = {name: {p.first: digests[name, p.first] for p in pieces_of(what)} for name, what in plan.shapes.items()}
    ledger = write_ledger({name: entry_of(what, by_name[name]) for name, what in plan.shapes.items()})
    small = {LEDGER: ledger, STATE: json.dumps(state, indent=1).encode()}
    files = {each.file: {"bytes": each.bytes, "sha256": each.sha256} for each in written}
    for name, raw in small.items():
        write_file(folder / name, raw)
        files[name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    content = {
        "format": FORMAT,
        "step": step,
        "moefold": __version__,
        "torch": torch.__version__,
        "layout": {"dense": world.dense.sizes, "expert": world.expert.sizes},
        "files": files,
    }
    write_file(folder / MANIFEST, seal(content))
    sync_folder(folder)
    if folder != final:
        move_tree(folder, final)
    sync_folder(final.parent)
    point_latest_at(final)


def is_whole(final: Place) -> bool:
    """Whether this step is saved already. One that got damaged since is set aside, to be written anew."""
    if not (final / MANIFEST).exists() and not isinstance(final, Path):
        return False  # never committed
    if not final.exists():
        return False
    try:
        verify(final)
        return True
    except Damaged:
        set_aside(final, "damaged")
        return False


def explained(error: Exception, place: Place) -> Exception:
    """What went wrong while writing, as a person would say it; what is no file problem stays as it is."""
    text = str(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text:
        has = free_bytes(place)
        told = "" if has is None else f" ({has / 2**20:.1f} MiB free)"
        return Refused(
            f"no space left on {place}{told} while writing a checkpoint; "
            "free some, or choose another place with --out; checkpoints written before are untouched"
        )
    if isinstance(error, OSError):
        why = error.strerror or error
        return Refused(f"cannot write in {place}: {why}; expected a folder that can be written")
    return error
