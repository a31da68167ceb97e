"""Write a checkpoint so that it is either there whole or not there at all.

    step-00000100.tmp/   every rank writes and hashes its file; rank 0 adds ledger, state and manifest; all is synced
    step-00000100/       the rename commits it; `latest` then points here; older ones that are not kept go

A folder is never written twice. Whatever interrupts this, the previous checkpoint stays. `save` does it at once,
checkpoint/live/background_saver.py beside the training.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from moefold.checkpoint.format.ledger import encode_ledger, hash_pieces, ledger_entry
from moefold.checkpoint.format.manifest import (
    CHECKPOINT_FORMAT,
    LEDGER_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    seal_manifest,
)
from moefold.checkpoint.format.reader import BoxReader, read_chunk_index
from moefold.checkpoint.format.retention import (
    RetentionPolicy,
    prune_checkpoints,
    retire_checkpoint,
    step_folder_name,
    update_latest_link,
)
from moefold.checkpoint.format.storage import (
    StoragePath,
    create_folder,
    free_disk_bytes,
    fsync_folder,
    remove_tree,
    rename_tree,
    staging_folder,
    write_synced_file,
)
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.format.write_plan import WritePlan, assign_writers
from moefold.checkpoint.live.host_image import HostImage, PieceDigests, WrittenFile
from moefold.checkpoint.live.logical_tensors import LogicalTensors, TensorPart, as_tensor_part
from moefold.comm.collectives import all_gather_objects
from moefold.comm.consensus import gather_results, result_of_rank_zero
from moefold.config.errors import UserError
from moefold.layout.axes import World
from moefold.version import __version__

METADATA_BYTES = 1 << 20  # bytes beyond the tensors: ledger, manifest, file headers

T = TypeVar("T")


def save_checkpoint(
    shelf: StoragePath, step: int, tensors: LogicalTensors, state: dict[str, Any], keep: RetentionPolicy, world: World
) -> StoragePath:
    """Commit a checkpoint of `step` and return its path. Every rank calls this."""
    parts = {name: as_tensor_part(tensor) for name, tensor in tensors.items()}
    plan = gather_write_plan(parts, world)
    image = HostImage(plan, world.rank, pinned=world.device.type == "cuda")
    image.fill(parts)
    return write_checkpoint(shelf, step, plan, image, state, keep, world)


def gather_write_plan(parts: dict[str, TensorPart], world: World) -> WritePlan:
    mine = {name: (part.what, [held.box for held in part.held]) for name, part in parts.items()}
    return assign_writers(all_gather_objects(mine, world.everyone))


def write_checkpoint(
    shelf: StoragePath,
    step: int,
    plan: WritePlan,
    image: HostImage,
    state: dict[str, Any],
    keep: RetentionPolicy,
    world: World,
) -> StoragePath:
    """From filled images to a committed checkpoint. Every rank calls this."""
    final = shelf / step_folder_name(step)
    folder = staging_folder(final)
    if run_on_rank_zero(lambda: is_already_saved(final), world, shelf):
        return final
    run_on_rank_zero(lambda: prepare_staging(folder, plan.bytes + METADATA_BYTES), world, shelf)
    written = [each for each in run_on_every_rank(lambda: image.write(folder), world, shelf) if each]
    digests: PieceDigests = {piece: found for each in written for piece, found in each.digests.items()}
    for found in run_on_every_rank(lambda: hash_split_pieces(folder, plan, written, world), world, shelf):
        digests |= found
    run_on_rank_zero(lambda: commit_checkpoint(folder, final, step, state, plan, written, digests, world), world, shelf)
    run_on_rank_zero(lambda: prune_checkpoints(shelf, keep, final), world, shelf)
    return final


def run_on_every_rank(work: Callable[[], T], world: World, place: StoragePath) -> list[T]:
    """Results of the work on all ranks; if it fails, all ranks raise the same error, as a message about `place`."""
    return gather_results(work, world, partial(explain_write_error, place=place))


def run_on_rank_zero(work: Callable[[], T], world: World, place: StoragePath) -> T:
    """Rank 0 does the work; every rank gets its result, or its error as a message about `place`."""
    return result_of_rank_zero(work, world, partial(explain_write_error, place=place))


def hash_split_pieces(folder: StoragePath, plan: WritePlan, written: list[WrittenFile], world: World) -> PieceDigests:
    """This rank's share of the pieces that lie in several files, or not in one run: read back, and hashed."""
    mine = list(plan.split_pieces())[world.rank :: world.size]
    if not mine:
        return {}
    index, _ = read_chunk_index(folder, {each.file: each.sha256 for each in written})
    reader = BoxReader(folder, index, plan.shapes)
    return {(name, piece.first): reader.digest(name, piece) for name, piece in mine}


def checkpoint_bytes(tensors: LogicalTensors, world: World) -> int:
    """Bytes of a checkpoint: every logical tensor whole, whatever part of it this rank holds, of all pipeline ranks."""
    here = sum(as_tensor_part(tensor).what.bytes for tensor in tensors.values())
    return sum(all_gather_objects(here, world.axis("pp"))) + METADATA_BYTES


def require_free_space(place: StoragePath, needed: int) -> None:
    """Refuse before writing what cannot fit."""
    has = free_disk_bytes(place)
    if has is not None and has < needed:
        raise UserError(
            f"no space on {place}: a checkpoint needs {needed / 2**20:.1f} MiB, there are {has / 2**20:.1f}; "
            "free some, or choose another place with --out; checkpoints written before are untouched"
        )


def prepare_staging(folder: StoragePath, needed: int) -> None:
    """An empty folder to write in; what an interrupted save left there goes."""
    if folder.exists():
        remove_tree(folder)
    if isinstance(folder, Path):
        folder.parent.mkdir(parents=True, exist_ok=True)
    require_free_space(folder.parent, needed)
    create_folder(folder)


def commit_checkpoint(
    folder: StoragePath,
    final: StoragePath,
    step: int,
    state: dict[str, Any],
    plan: WritePlan,
    written: list[WrittenFile],
    digests: PieceDigests,
    world: World,
) -> None:
    by_name = {name: {p.first: digests[name, p.first] for p in hash_pieces(what)} for name, what in plan.shapes.items()}
    ledger = encode_ledger({name: ledger_entry(what, by_name[name]) for name, what in plan.shapes.items()})
    small = {LEDGER_FILE: ledger, STATE_FILE: json.dumps(state, indent=1).encode()}
    files = {each.file: {"bytes": each.bytes, "sha256": each.sha256} for each in written}
    for name, raw in small.items():
        write_synced_file(folder / name, raw)
        files[name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    content = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "moefold": __version__,
        "torch": torch.__version__,
        "layout": {"dense": world.dense.sizes, "expert": world.expert.sizes},
        "files": files,
    }
    write_synced_file(folder / MANIFEST_FILE, seal_manifest(content))
    fsync_folder(folder)
    if folder != final:
        rename_tree(folder, final)
    fsync_folder(final.parent)
    update_latest_link(final)


def is_already_saved(final: StoragePath) -> bool:
    """Whether this step is saved already. One that got damaged since is set aside, to be written anew."""
    if not (final / MANIFEST_FILE).exists() and not isinstance(final, Path):
        return False  # never committed
    if not final.exists():
        return False
    try:
        verify_checkpoint(final)
        return True
    except DamagedCheckpoint:
        retire_checkpoint(final, "damaged")
        return False


def explain_write_error(error: Exception, place: StoragePath) -> Exception:
    """What went wrong while writing, as a person would say it; what is no file problem stays as it is."""
    text = str(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text:
        has = free_disk_bytes(place)
        told = "" if has is None else f" ({has / 2**20:.1f} MiB free)"
        return UserError(
            f"no space left on {place}{told} while writing a checkpoint; "
            "free some, or choose another place with --out; checkpoints written before are untouched"
        )
    if isinstance(error, OSError):
        why = error.strerror or error
        return UserError(f"cannot write in {place}: {why}; expected a folder that can be written")
    return error
