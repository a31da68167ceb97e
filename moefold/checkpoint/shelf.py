"""The checkpoints of a run: one folder each, named by its step. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moefold.checkpoint.manifest import MANIFEST, STATE
from moefold.checkpoint.place import Place, move_tree, remove_tree
from moefold.config.refused import Refused


@dataclass(frozen=True)
class Keep:
    """How many checkpoints stay: the last few, and for good those whose step is a multiple of `every` (0: none)."""

    last: int
    every: int = 0


def folder_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Place) -> int:
    return int(checkpoint.name[5:])


def committed(shelf: Place) -> list[Place]:
    """The checkpoints there, newest first. Where nothing can be renamed, one without a manifest is none yet."""
    if not shelf.is_dir():
        return []
    named = [p for p in shelf.iterdir() if p.name.startswith("step-") and p.name[5:].isdecimal() and p.is_dir()]
    whole = [p for p in named if isinstance(p, Path) or (p / MANIFEST).is_file()]
    return sorted(whole, key=step_of, reverse=True)


def candidates(place: Place) -> list[Place]:
    """The checkpoints at a place, newest first: it may be a run, a folder of checkpoints, or one checkpoint."""
    for shelf in (place / "checkpoints", place):
        if inside := committed(shelf):
            return inside
    return [place] if (place / MANIFEST).exists() or (place / STATE).exists() else []


def newest(place: Place) -> Place:
    """The checkpoint that a person means by a place, whole or not."""
    if found := candidates(place):
        return found[0]
    there = "there is none in it" if place.exists() else "no such folder"
    raise Refused(f"no checkpoint at {place}: {there}; expected a run, its checkpoints folder, or one checkpoint")


def set_aside(checkpoint: Place, why: str) -> None:
    """Rename a checkpoint so that it is no longer found. Nothing is deleted but an older one set aside before."""
    aside = checkpoint.with_suffix(f".{why}")
    if aside.exists():
        remove_tree(aside)
    move_tree(checkpoint, aside)


def set_aside_after(shelf: Place, step: int) -> None:
    """A run that continues from an earlier step leaves the later ones behind; one that continues another run, all."""
    for newer in committed(shelf):
        if step_of(newer) > step:
            set_aside(newer, "superseded")


def prune(shelf: Place, keep: Keep, new: Place) -> None:
    """Let go of what need not be kept; the one just written stays in any case."""
    others = [old for old in committed(shelf) if old != new]
    for old in others[keep.last - 1 :]:
        if not keep.every or step_of(old) % keep.every:
            remove_tree(old)


def point_latest_at(final: Place) -> None:
    """Move the `latest` link by rename, so that it always points at something. It is for people; loading looks for
    the newest whole checkpoint itself. An object store has no links."""
    if isinstance(final, Path):
        link = final.parent / "latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, final.parent / "latest")
