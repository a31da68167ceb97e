"""Whether a checkpoint is as it was written: its files by the manifest, its values by the ledger. Torch-free.

Opening one reads no values. Hashing them is work that can be dealt out, to threads or to ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

from moefold.checkpoint.boxes import Box, elements
from moefold.checkpoint.ledger import Ledger, Piece, Shape, compare, digest, entry_of, pieces_of, read_ledger
from moefold.checkpoint.manifest import LEDGER, STATE, Damaged, data_files, listed_files, read_manifest
from moefold.checkpoint.place import Place
from moefold.checkpoint.reader import Index, Reader, read_index
from moefold.config.refused import printable

MOST = 1 << 10  # times the values that are there: a ledger that claims more of a tensor is not believed

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
    shapes: dict[str, Shape]
    problems: tuple[str, ...] = ()

    def reader(self) -> Reader:
        return Reader(self.path, self.index, self.shapes)

    def work(self) -> Work:
        """Every piece there is to hash."""
        return [(name, piece) for name in sorted(self.index) for piece in pieces_of(self.shapes[name])]

    def judge(self, digests: Digests) -> None:
        """Raise what is wrong, now that the values are hashed."""
        empty = [name for name, entry in self.ledger.items() if 0 in entry.shape]  # of these nothing is stored
        by_name: dict[str, dict[int, bytes | None]] = {name: {} for name in (*self.index, *empty)}
        for (name, first), found in digests.items():
            by_name[name][first] = found
        found = {name: entry_of(self.shapes[name], pieces) for name, pieces in by_name.items()}
        if problems := [*self.problems, *(each.text for each in compare(self.ledger, found))]:
            raise Damaged(*problems)


def shapes_of(ledger: Ledger, index: Index) -> dict[str, Shape]:
    """What the files hold, by their own headers; the whole shapes are the ledger's where chunks lie inside of these."""
    lost = [entry for name, entry in ledger.items() if name not in index]
    found = {name: entry.what for name, entry in ledger.items()}
    for name, chunks in index.items():
        entry, held = ledger.get(name), sum(elements(chunk.box) for chunk in chunks)
        if len({len(chunk.box) for chunk in chunks}) > 1:
            raise Damaged(f'chunks of "{printable(name)}" are of different dims')
        if entry and all(inside(chunk.box, entry.shape) for chunk in chunks) and prod(entry.shape) <= MOST * held:
            found[name] = Shape(chunks[0].dtype, entry.shape, entry.experts is not None)
            continue
        shape = tuple(max(map(sum, ranges)) for ranges in zip(*(chunk.box for chunk in chunks), strict=True))
        if prod(shape) != held:
            raise Damaged(f'chunks of "{printable(name)}" hold {held} values, and do not make a tensor')
        alike = [each for each in ([entry] if entry else lost) if each.shape[1:] == shape[1:]]
        found[name] = Shape(chunks[0].dtype, shape, any(each.experts is not None for each in alike))
    return found


def inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(sum(ranges) <= size for ranges, size in zip(box, shape, strict=True))


def open_checkpoint(path: Place) -> Opened:
    """All files are there, of their size, and what is not a value is as it was written; or Damaged."""
    manifest = read_manifest(path)
    files = listed_files(manifest)
    if problems := [problem for name, (size, _) in files.items() if (problem := misplaced(path, name, size))]:
        raise Damaged(*problems)
    ledger = read_ledger(checked(path, LEDGER, files[LEDGER][1]))
    state = read_state(checked(path, STATE, files[STATE][1]))
    headers = {name: files[name][1] for name in data_files(files)}
    index, problems = read_index(path, headers)
    return Opened(path, manifest, state, ledger, index, shapes_of(ledger, index), tuple(problems))


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
