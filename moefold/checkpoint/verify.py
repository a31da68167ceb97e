"""Whether a checkpoint is as it was written: its files by the manifest, its values by the ledger. Torch-free.

Opening one reads no values. Hashing them is work that can be dealt out, to threads or to ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from moefold.checkpoint.boxes import overlap, whole_box
from moefold.checkpoint.ledger import Ledger, Piece, Shape, compare, digest, entry_of, pieces_of, read_ledger
from moefold.checkpoint.manifest import LEDGER, STATE, Damaged, data_files, listed_files, read_manifest
from moefold.checkpoint.place import Place
from moefold.checkpoint.reader import Changed, Chunk, Index, Reader, read_index

Work = list[tuple[str, Piece]]
Digests = Mapping[tuple[str, int], bytes | None]


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose files are all there. `problems`: what is known to be wrong with it before values are read."""

    path: Place
    manifest: dict[str, Any]
    state: dict[str, Any]
    ledger: Ledger
    index: Index
    problems: tuple[str, ...] = ()

    def shapes(self) -> dict[str, Shape]:
        """What the files hold, by their own headers; whole shapes are the ledger's where they agree with it."""
        return {name: self.shape_of(name) for name in {*self.index, *self.ledger}}

    def shape_of(self, name: str) -> Shape:
        chunks, entry = self.index.get(name, []), self.ledger.get(name)
        if not chunks and entry:
            return entry.what
        reach = hull(chunks)
        if entry and fits(chunks, entry.shape):
            return Shape(chunks[0].dtype, entry.shape, entry.experts is not None)
        stacked = Shape(chunks[0].dtype, reach, True)
        known = [entry] if entry else [each for other, each in self.ledger.items() if other not in self.index]
        return stacked._replace(stacked=any(each.experts is not None and each.shape[1:] == reach[1:] for each in known))

    def reader(self) -> Reader:
        return Reader(self.path, self.index, self.shapes())

    def work(self) -> Work:
        """Every piece there is to hash."""
        named = sorted(name for name in self.shapes() if name in self.index or name in self.ledger)
        return [(name, piece) for name in named for piece in pieces_of(self.shape_of(name))]

    def judge(self, digests: Digests) -> None:
        """Raise what is wrong, now that the values are hashed."""
        by_name: dict[str, dict[int, bytes | None]] = {name: {} for name in self.index}
        by_name |= {name: {} for name, entry in self.ledger.items() if 0 in entry.shape}  # nothing to store
        for (name, first), found in digests.items():
            if name in by_name:
                by_name[name][first] = found
        found = {name: entry_of(self.shape_of(name), by_name[name]) for name in by_name}
        if problems := [*self.problems, *(each.text for each in compare(self.ledger, found))]:
            raise Damaged(*problems)


def hull(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    return tuple(max(start + size for start, size in ranges) for ranges in zip(*(c.box for c in chunks), strict=True))


def fits(chunks: Sequence[Chunk], shape: Sequence[int]) -> bool:
    whole = whole_box(shape)
    return all(len(c.box) == len(shape) and (overlap(c.box, whole) or ()) == c.box for c in chunks)


def open_checkpoint(path: Place) -> Opened:
    """All files are there, of their size, and what is not a value is as it was written; or Damaged."""
    manifest = read_manifest(path)
    files = listed_files(manifest)
    if problems := [problem for name, (size, _) in files.items() if (problem := misplaced(path, name, size))]:
        raise Damaged(*problems)
    ledger = read_ledger(checked(path, LEDGER, files[LEDGER][1]))
    state = read_state(checked(path, STATE, files[STATE][1]))
    headers = {name: files[name][1] for name in data_files(files)}
    try:
        return Opened(path, manifest, state, ledger, read_index(path, headers))
    except Changed as changed:
        if changed.unreadable:
            raise
        return Opened(path, manifest, state, ledger, changed.index, changed.problems)


def misplaced(folder: Place, name: str, size: int) -> str | None:
    """What is wrong with a file before it is opened."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        return f"{name!r} is no name of a file"
    file = folder / name
    if file.is_symlink():
        return f"{name} is a link; expected the file itself"
    if not file.is_file():
        return f"{name} is missing"
    there = file.stat().st_size
    return f"{name} has {there} bytes; expected {size}" if there != size else None


def checked(folder: Place, name: str, sha256: str) -> bytes:
    raw = (folder / name).read_bytes()
    if digest(raw).hex() != sha256:
        raise Damaged(f"{name} does not match its digest: its content changed after it was written")
    return raw


def read_state(raw: bytes) -> dict[str, Any]:
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise Damaged(f"{STATE} is not readable")
    return state


def hashed(opened: Opened, work: Work) -> dict[tuple[str, int], bytes | None]:
    """The digests of these pieces, as the files have them now."""
    reader = opened.reader()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = pool.map(lambda each: reader.digest(*each), work)
        return {(name, piece.first): each for (name, piece), each in zip(work, found, strict=True)}


def verify(path: Place) -> Opened:
    """The checkpoint, if every byte of it is as it was written; or Damaged, with all that is wrong."""
    opened = open_checkpoint(path)
    opened.judge(hashed(opened, opened.work()))
    return opened
