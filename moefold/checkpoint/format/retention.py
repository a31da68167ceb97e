"""Retention: which checkpoints of a run exist, which are kept, and the `latest` link. Torch-free.

A run has one folder per checkpoint, named by its step.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moefold.checkpoint.format.manifest import MANIFEST_FILE, STATE_FILE
from moefold.checkpoint.format.storage import StoragePath, remove_tree, rename_tree
from moefold.config.errors import UserError

STEP_PREFIX = "step"


@dataclass(frozen=True)
class RetentionPolicy:
    """The last few checkpoints are kept, and for good those whose step is a multiple of `every` (0: none)."""

    last: int
    every: int = 0

    def keeps_forever(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


def step_folder_name(step: int) -> str:
    return f"{STEP_PREFIX}-{step:08d}"


def step_of_folder(checkpoint: StoragePath) -> int:
    _, step = checkpoint.name.split("-")
    return int(step)


def is_step_folder(path: StoragePath) -> bool:
    prefix, _, step = path.name.partition("-")
    return prefix == STEP_PREFIX and step.isdecimal() and path.is_dir()


def is_committed(checkpoint: StoragePath) -> bool:
    """A local folder gets its name by the commit. Remote storage cannot rename: there the manifest commits."""
    if isinstance(checkpoint, Path):
        return True
    manifest = checkpoint / MANIFEST_FILE
    return manifest.is_file()


def committed_checkpoints(folder: StoragePath) -> list[StoragePath]:
    """The checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    steps = filter(is_step_folder, folder.iterdir())
    committed = filter(is_committed, steps)
    return sorted(committed, key=step_of_folder, reverse=True)


def checkpoints_at(path: StoragePath) -> list[StoragePath]:
    """The checkpoints at a path, newest first. The path may be a run, a folder of checkpoints, or one checkpoint."""
    for folder in (path / "checkpoints", path):
        checkpoints = committed_checkpoints(folder)
        if checkpoints:
            return checkpoints
    for name in (MANIFEST_FILE, STATE_FILE):
        if (path / name).exists():
            return [path]
    return []


def newest_checkpoint(path: StoragePath) -> StoragePath:
    """The newest checkpoint at a path that a user named, intact or not."""
    checkpoints = checkpoints_at(path)
    if checkpoints:
        return checkpoints[0]
    reason = "there is none in it" if path.exists() else "no such folder"
    raise UserError(f"no checkpoint at {path}: {reason}; expected a run, its checkpoints folder, or one checkpoint")


def retire_checkpoint(checkpoint: StoragePath, reason: str) -> None:
    """Rename a checkpoint so that it is no longer found. An older one that was retired for the same reason is removed;
    nothing else is."""
    retired = checkpoint.with_suffix(f".{reason}")
    if retired.exists():
        remove_tree(retired)
    rename_tree(checkpoint, retired)


def retire_later_checkpoints(folder: StoragePath, step: int) -> None:
    """Retire the checkpoints after the step from which a run continues; all of them (step -1) if it continues from
    another run."""
    for checkpoint in committed_checkpoints(folder):
        if step_of_folder(checkpoint) > step:
            retire_checkpoint(checkpoint, "superseded")


def prune_checkpoints(folder: StoragePath, keep: RetentionPolicy, newest: StoragePath) -> list[str]:
    """Remove the checkpoints that the policy does not keep. The one just written always stays, and so do links, which
    no run has made. Returns what could not be removed, and why: that does not undo the checkpoint just written."""
    committed = committed_checkpoints(folder)
    others = [old for old in committed if old != newest and not old.is_symlink()]
    problems: list[str] = []
    for old in others[keep.last - 1 :]:
        step = step_of_folder(old)
        if keep.keeps_forever(step):
            continue
        try:
            remove_tree(old)
        except OSError as error:
            problems.append(f"{old} cannot be removed: {error.strerror or error}")
    return problems


def update_latest_link(final: StoragePath) -> None:
    """Point the `latest` link at a checkpoint, by rename, so that it never dangles. The link is for people: loading
    looks for the newest intact checkpoint itself. Object stores have no links."""
    if isinstance(final, Path):
        link = final.parent / "latest.tmp"
        with suppress(OSError):  # the checkpoint is there without it
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            os.replace(link, final.parent / "latest")


def newest_step(folder: StoragePath) -> int:
    return max(map(step_of_folder, committed_checkpoints(folder)), default=-1)
