"""Write a checkpoint so that it is either there whole or not there at all.

    step-00000100.tmp/   every rank writes and hashes its file; rank 0 adds state.json and the manifest; all is synced
    step-00000100/       the rename commits it; `latest` then points here; older ones beyond `keep` go

A folder is never written twice. Whatever interrupts this, the previous checkpoint stays.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from moefold import __version__
from moefold.checkpoint.manifest import FORMAT, MANIFEST, STATE, Damaged, seal, verify
from moefold.checkpoint.storage import SafeWriter, digest_of
from moefold.comm.collectives import gather_objects
from moefold.config.refused import Refused
from moefold.layout.axes import World

SPARE = 1 << 20  # bytes beyond the tensors: tables, manifest, file headers


def folder_of(step: int) -> str:
    return f"step-{step:08d}"


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], keep: int, world: World):
    """Commit a checkpoint of `step` under `folder` and return its path. Every rank calls this."""
    final = folder / folder_of(step)
    temporary = final.with_suffix(".tmp")
    if agreed(lambda: is_whole(final), world, folder):
        return final
    needed = bytes_of(tensors, world)
    agreed(lambda: prepare(temporary, needed), world, folder)
    writer = SafeWriter(temporary, world.rank)
    try:
        with quiet_about_one_process():
            dcp.save(tensors, storage_writer=writer, no_dist=world.size == 1, process_group=world.everyone.group)
    except (Exception, CheckpointException) as error:
        raise explained(error, folder) from None
    agreed(lambda: commit(temporary, final, step, state, writer.digests, world), world, folder)
    agreed(lambda: prune(folder, keep, final), world, folder)
    return final


@contextmanager
def quiet_about_one_process() -> Iterator[None]:
    """torch warns that no process group exists; with one rank that is as it should be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def agreed(work: Any, world: World, folder: Path) -> Any:
    """Rank 0 does the work; every rank gets its result, or refuses as it did. Nobody is left waiting."""
    result: Any = None
    problem: Exception | None = None
    if world.rank == 0:
        try:
            result = work()
        except Exception as error:
            problem = explained(error, folder)
    result, problem = gather_objects((result, problem), world.everyone)[0]
    if problem:
        raise problem
    return result


def bytes_of(tensors: dict[str, torch.Tensor], world: World) -> int:
    """Bytes of a checkpoint: every logical tensor whole, whatever part of it this rank holds, of all pipeline ranks."""
    here = sum(t.numel() * t.element_size() for t in tensors.values())
    return sum(gather_objects(here, world.axis("pp"))) + SPARE


def require_space(folder: Path, needed: int) -> None:
    """Refuse before writing what cannot fit."""
    has = shutil.disk_usage(folder).free
    if has < needed:
        raise Refused(
            f"no space on {folder}: a checkpoint needs {needed / 2**20:.1f} MiB, there are {has / 2**20:.1f}; "
            "free some, or choose another place with --out; checkpoints written before are untouched"
        )


def prepare(temporary: Path, needed: int) -> None:
    """An empty folder to write in; what an interrupted save left there goes."""
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    require_space(temporary.parent, needed)
    temporary.mkdir()


def commit(
    temporary: Path, final: Path, step: int, state: dict[str, Any], digests: dict[str, str], world: World
) -> None:
    (temporary / STATE).write_text(json.dumps(state, indent=1))
    digests = {**digests, STATE: digest_of(temporary / STATE)}
    files = {name: {"bytes": (temporary / name).stat().st_size, "sha256": sha} for name, sha in digests.items()}
    content = {
        "format": FORMAT,
        "step": step,
        "moefold": __version__,
        "torch": torch.__version__,
        "layout": {"dense": world.dense.sizes, "expert": world.expert.sizes},
        "files": files,
    }
    (temporary / MANIFEST).write_bytes(seal(content))
    for name in [*files, MANIFEST]:
        sync(temporary / name)
    sync(temporary)
    os.rename(temporary, final)
    sync(final.parent)
    point_latest_at(final)


def sync(path: Path) -> None:
    """Make sure a file or a folder's list of names is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def point_latest_at(final: Path) -> None:
    """Move the `latest` link by rename, so that it always points at something. It is for people; loading looks for
    the newest whole checkpoint itself."""
    link = final.parent / "latest.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, final.parent / "latest")


def is_whole(final: Path) -> bool:
    """Whether this step is saved already. One that got damaged since is set aside, to be written anew."""
    if not final.exists():
        return False
    try:
        verify(final)
        return True
    except Damaged:
        set_aside(final, "damaged")
        return False


def set_aside(checkpoint: Path, why: str) -> None:
    """Rename a checkpoint so that it is no longer found. Nothing is deleted but an older one set aside before."""
    aside = checkpoint.with_suffix(f".{why}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)


def set_aside_after(folder: Path, step: int) -> None:
    """A run that continues from an earlier step leaves the later ones behind; one that continues another run, all."""
    for newer in committed(folder):
        if int(newer.name[5:]) > step:
            set_aside(newer, "superseded")


def prune(folder: Path, keep: int, new: Path) -> None:
    """Keep the newest few; the one just written stays in any case."""
    for old in [p for p in committed(folder) if p != new][keep - 1 :]:
        shutil.rmtree(old)


def committed(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def explained(error: BaseException, folder: Path) -> Exception:
    """What went wrong while writing, as a person would say it; what is no file problem stays as it is."""
    if isinstance(error, CheckpointException):
        return explained(next(iter(error.failures.values()))[0], folder)
    text = str(error)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "os error 28" in text:
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        has = shutil.disk_usage(there).free / 2**20
        return Refused(
            f"no space left on {folder} ({has:.1f} MiB free) while writing a checkpoint; "
            "free some, or choose another place with --out; checkpoints written before are untouched"
        )
    if isinstance(error, OSError | SafetensorError):
        why = getattr(error, "strerror", None) or error
        return Refused(f"cannot write in {folder}: {why}; expected a folder that can be written")
    return error if isinstance(error, Exception) else RuntimeError(text)
