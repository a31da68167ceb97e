"""The checkpoints of a run: one folder each, named by its step. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moefold.checkpoint.format.manifest import MANIFEST_FILE, STATE_FILE
from moefold.checkpoint.format.storage import StoragePath, remove_tree, rename_tree
from moefold.config.errors import UserError


@dataclass(frozen=True)
class RetentionPolicy:
    """How many checkpoints stay: the last few, and for good those whose step is a multiple of `every` (0: none)."""

    last: int
    every: int = 0


def step_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of_folder(checkpoint: StoragePath) -> int:
    return int(checkpoint.name[5:])


def committed_checkpoints(shelf: StoragePath) -> list[StoragePath]:
    """The checkpoints there, newest first. Where nothing can be renamed, one without a manifest is none yet."""
    if not shelf.is_dir():
        return []
    named = [p for p in shelf.iterdir() if p.name.startswith("step-") and p.name[5:].isdecimal() and p.is_dir()]
    whole = [p for p in named if isinstance(p, Path) or (p / MANIFEST_FILE).is_file()]
    return sorted(whole, key=step_of_folder, reverse=True)


def checkpoints_at(place: StoragePath) -> list[StoragePath]:
    """The checkpoints at a place, newest first: it may be a run, a folder of checkpoints, or one checkpoint."""
    for shelf in (place / "checkpoints", place):
        if inside := committed_checkpoints(shelf):
            return inside
    return [place] if (place / MANIFEST_FILE).exists() or (place / STATE_FILE).exists() else []


def newest_checkpoint(place: StoragePath) -> StoragePath:
    """The checkpoint that a person means by a place, whole or not."""
    if found := checkpoints_at(place):
        return found[0]
    there = "there is none in it" if place.exists() else "no such folder"
    raise UserError(f"no checkpoint at {place}: {there}; expected a run, its checkpoints folder, or one checkpoint")


def retire_checkpoint(checkpoint: StoragePath, why: str) -> None:
    """Rename a checkpoint so that it is no longer found. Nothing is deleted but an older one set aside before."""
    aside = checkpoint.with_suffix(f".{why}")
    if aside.exists():
        remove_tree(aside)
    rename_tree(checkpoint, aside)


def retire_later_checkpoints(shelf: StoragePath, step: int) -> None:
    """A run that continues from an earlier step leaves the later ones behind; one that continues another run, all."""
    for newer in committed_checkpoints(shelf):
        if step_of_folder(newer) > step:
            retire_checkpoint(newer, "superseded")


def prune_checkpoints(shelf: StoragePath, keep: RetentionPolicy, new: StoragePath) -> None:
    """Let go of what need not be kept; the one just written stays in any case."""
    others = [old for old in committed_checkpoints(shelf) if old != new]
    for old in others[keep.last - 1 :]:
        if not keep.every or step_of_folder(old) % keep.every:
            remove_tree(old)


def update_latest_link(final: StoragePath) -> None:
    """Move the `latest` link by rename, so that it always points at something. It is for people; loading looks for
    the newest whole checkpoint itself. An object store has no links."""
    if isinstance(final, Path):
        link = final.parent / "latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, final.parent / "latest")
