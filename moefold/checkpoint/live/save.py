"""Atomic writing of a checkpoint: it is there whole, or not at all.

    step-00000100.tmp/   every rank writes and hashes its file; rank 0 adds ledger, state and manifest; all is synced
    step-00000100/       the rename commits the checkpoint; `latest` points here; older ones are pruned

A folder is never written twice. Whatever interrupts a save, the previous checkpoint stays. `save_checkpoint` blocks;
background_saver.py saves concurrently with the training.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch

from moefold.checkpoint.format.boxes import Box
from moefold.checkpoint.format.ledger import (
    Digest,
    HashPiece,
    Ledger,
    PieceDigests,
    TensorSpec,
    encode_ledger,
    hash_pieces,
    ledger_entry,
)
from moefold.checkpoint.format.manifest import (
    CHECKPOINT_FORMAT,
    LEDGER_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    seal_manifest,
    sha256_hex,
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
    METADATA_BYTES,
    StoragePath,
    create_folder,
    free_disk_bytes,
    fsync_folder,
    remove_tree,
    rename_tree,
    require_free_space,
    staging_folder,
    write_synced_file,
)
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.format.write_plan import RankPlan, WritePlan, assign_writers
from moefold.checkpoint.live.copy_lanes import CopyLanes
from moefold.checkpoint.live.file_passage import FilePassage
from moefold.checkpoint.live.host_window import HostWindow
from moefold.checkpoint.live.logical_tensors import LogicalTensors, TensorPart, as_tensor_part
from moefold.checkpoint.live.rank_file import RankFile, WrittenFile, rank_file_name
from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.consensus import attempt, gather_results, keep_error, raise_first_problem, result_of_rank_zero
from moefold.comm.host_objects import gather_objects, scatter_objects, union_of_sets
from moefold.config.errors import UserError
from moefold.layout.axes import World
from moefold.observe.printer import Printer, print_nothing
from moefold.version import __version__

T = TypeVar("T")


@dataclass(frozen=True)
class SavePlan:
    """What this rank writes, and on rank 0 what all ranks write: `whole` is None elsewhere."""

    mine: RankPlan
    whole: WritePlan | None


@dataclass(frozen=True)
class SplitWork:
    """Pieces that one rank reads back and hashes: the pieces with their specs, and the files that hold parts of them,
    with the digest of each file's header."""

    pieces: list[tuple[str, HashPiece]]
    specs: dict[str, TensorSpec]
    headers: dict[str, str]


def save_checkpoint(
    checkpoints: StoragePath,
    step: int,
    tensors: LogicalTensors,
    state: dict[str, Any],
    keep: RetentionPolicy,
    world: World,
    window_bytes: int | None = None,
) -> StoragePath:
    """Commit a checkpoint of `step` and return its path. Every rank calls this. `window_bytes`: host memory that this
    rank's file may take; None: as much as it has bytes."""
    parts: dict[str, TensorPart] = {}
    for name, tensor in tensors.items():
        parts[name] = as_tensor_part(tensor)
    plan = gather_write_plan(parts, world)
    window = open_window(plan, world, window_bytes)
    with FilePassage(window, parts, CopyLanes(world.device), Event()) as passage:
        return write_checkpoint(checkpoints, step, plan, passage, state, keep, world)


def open_window(plan: SavePlan, world: World, most: int | None) -> HostWindow:
    """Host memory for this rank's file: at most so many bytes. Every rank calls this: where one has no room for its
    file, all wait for the files, since a rank that went on would wait for it in the midst of a step."""
    on_gpu = world.device.type == "cuda"
    window = HostWindow(RankFile(plan.mine, world.rank), most, on_gpu)
    of_all = union_of_sets({window.holds_file}, world.everyone)
    window.holds_file = all(of_all)
    return window


def gather_write_plan(parts: dict[str, TensorPart], world: World) -> SavePlan:
    """Rank 0 plans for all ranks and sends each rank its part."""
    holdings: dict[str, tuple[TensorSpec, list[Box]]] = {}
    for name, part in parts.items():
        boxes = [held.box for held in part.held]
        holdings[name] = (part.spec, boxes)
    whole: WritePlan | None = None
    plans: list[RankPlan] | None = None
    problem: Exception | None = None
    holdings_by_rank = gather_objects(holdings, world.everyone)
    if holdings_by_rank is not None:
        whole, problem = attempt(partial(assign_writers, holdings_by_rank), keep_error)
    raise_first_problem(problem, world)
    if whole is not None:
        plans = whole.plans_of_ranks(world.size)
    mine = scatter_objects(plans, world.everyone)
    return SavePlan(mine, whole)


def write_checkpoint(
    checkpoints: StoragePath,
    step: int,
    plan: SavePlan,
    passage: FilePassage,
    state: dict[str, Any],
    keep: RetentionPolicy,
    world: World,
    say: Printer = print_nothing,
) -> StoragePath:
    """From the passage of every rank's file to a committed checkpoint. Every rank calls this."""
    final = checkpoints / step_folder_name(step)
    folder = staging_folder(final)
    if run_on_rank_zero(lambda: is_already_saved(final), world, checkpoints):
        return final
    needed = METADATA_BYTES
    if plan.whole is not None:
        needed += plan.whole.bytes
    run_on_rank_zero(lambda: prepare_staging(folder, needed), world, checkpoints)
    # Every rank writes its file, and hashes the pieces that it holds whole.
    write_file = partial(passage.write_file, folder)
    files = run_on_every_rank(write_file, world, checkpoints) or []
    passage.finish()
    written = [file for file in files if file]
    # Pieces that are split over files are read back and hashed.
    shares = None
    if plan.whole is not None:
        shares = share_split_pieces(plan.whole, written, world.size)
    work = scatter_objects(shares, world.everyone)
    hash_split = partial(hash_split_pieces, folder, work)
    split_digests = run_on_every_rank(hash_split, world, checkpoints) or []
    digests: PieceDigests = {}
    own_digests = [file.digests for file in written]
    for some in own_digests + split_digests:
        digests |= some

    def commit() -> None:
        assert plan.whole is not None
        commit_checkpoint(folder, final, step, state, plan.whole, written, digests, world)

    run_on_rank_zero(commit, world, checkpoints)
    prune = partial(prune_checkpoints, checkpoints, keep, final)
    for problem in run_on_rank_zero(prune, world, checkpoints):
        say(f"warning: {problem}")
    return final


def run_on_every_rank(work: Callable[[], T], world: World, place: StoragePath) -> list[T] | None:
    """Results of the work on all ranks, on rank 0; if it fails, all ranks raise the same error, as a message about
    `place`."""
    return gather_results(work, world, partial(explain_write_error, place=place))


def run_on_rank_zero(work: Callable[[], T], world: World, place: StoragePath) -> T:
    """Rank 0 does the work; every rank gets its result, or its error as a message about `place`."""
    return result_of_rank_zero(work, world, partial(explain_write_error, place=place))


def share_split_pieces(plan: WritePlan, written: list[WrittenFile], ranks: int) -> list[SplitWork]:
    """The pieces that are not contiguous in one file, shared among the ranks."""
    header_digests = {file.name: file.sha256 for file in written}
    pieces = list(plan.split_pieces())
    shares: list[SplitWork] = []
    for rank in range(ranks):
        mine = pieces[rank::ranks]
        specs = {name: plan.specs[name] for name, _ in mine}
        headers: dict[str, str] = {}
        writers: set[int] = set()
        for name in specs:
            writers |= plan.writers(name)
        for writer in sorted(writers):
            file = rank_file_name(writer)
            headers[file] = header_digests[file]
        shares.append(SplitWork(mine, specs, headers))
    return shares


def hash_split_pieces(folder: StoragePath, work: SplitWork) -> PieceDigests:
    """The digests of this rank's share of the split pieces: they are read back."""
    index, _ = read_chunk_index(folder, work.headers)
    reader = BoxReader(folder, index, work.specs)
    digests: PieceDigests = {}
    for name, piece in work.pieces:
        digest = reader.piece_digest(name, piece)
        digests[name, piece.first] = digest
    return digests


def checkpoint_bytes(tensors: LogicalTensors, world: World) -> int:
    """Bytes of a checkpoint: every logical tensor of all pipeline ranks, whole."""
    parts = map(as_tensor_part, tensors.values())
    stage_bytes = sum(part.spec.bytes for part in parts)
    own = torch.tensor([stage_bytes])
    all_bytes = all_reduce_no_grad(own, world.pp)
    return int(all_bytes) + METADATA_BYTES


def prepare_staging(folder: StoragePath, needed: int) -> None:
    """Make an empty staging folder. What an interrupted save left there is removed."""
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
    """Write ledger, state and, last, the manifest; then give the folder its final name."""
    ledger = encode_ledger(make_ledger(plan, digests))
    raw_state = json.dumps(state, indent=1).encode()
    files: dict[str, dict[str, Any]] = {}
    for file in written:
        files[file.name] = {"bytes": file.bytes, "sha256": file.sha256}
    for name, raw in ((LEDGER_FILE, ledger), (STATE_FILE, raw_state)):
        write_synced_file(folder / name, raw)
        sha256 = sha256_hex(raw)
        files[name] = {"bytes": len(raw), "sha256": sha256}
    content = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "moefold": __version__,
        "torch": torch.__version__,
        "layout": {"dense": world.dense.sizes, "expert": world.expert.sizes},
        "files": files,
    }
    # The manifest makes the folder a checkpoint: it is written when all else is on the disk.
    write_synced_file(folder / MANIFEST_FILE, seal_manifest(content))
    fsync_folder(folder)
    if folder != final:
        rename_tree(folder, final)
    fsync_folder(final.parent)
    update_latest_link(final)


def make_ledger(plan: WritePlan, digests: PieceDigests) -> Ledger:
    ledger: Ledger = {}
    for name, spec in plan.specs.items():
        pieces: dict[int, Digest] = {}
        for piece in hash_pieces(spec):
            pieces[piece.first] = digests[name, piece.first]
        ledger[name] = ledger_entry(spec, pieces)
    return ledger


def is_already_saved(final: StoragePath) -> bool:
    """Whether an intact checkpoint of this step exists. A damaged one is retired, to be written again."""
    if not isinstance(final, Path) and not (final / MANIFEST_FILE).exists():
        return False  # never committed
    if not final.exists():
        return False
    try:
        verify_checkpoint(final)
    except DamagedCheckpoint:
        retire_checkpoint(final, "damaged")
        return False
    return True


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
