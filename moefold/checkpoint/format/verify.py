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

from moefold.checkpoint.format.boxes import Box, element_count
from moefold.checkpoint.format.ledger import (
    HashPiece,
    Ledger,
    TensorSpec,
    compare_ledgers,
    hash_pieces,
    ledger_entry,
    parse_ledger,
    sha256_digest,
)
from moefold.checkpoint.format.manifest import (
    LEDGER_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    listed_files,
    read_manifest,
    tensor_data_files,
)
from moefold.checkpoint.format.reader import BoxReader, ChunkIndex, read_chunk_index
from moefold.checkpoint.format.storage import StoragePath
from moefold.config.errors import printable_text

MOST_CLAIMED = 1 << 10  # times the values that are there: a ledger that claims more of a tensor is not believed

HashWork = list[tuple[str, HashPiece]]
FoundDigests = Mapping[tuple[str, int], bytes | None]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose files are all there. `problems`: what is known to be wrong with it before values are read."""

    path: StoragePath
    manifest: dict[str, Any]
    state: dict[str, Any]
    ledger: Ledger
    index: ChunkIndex
    shapes: dict[str, TensorSpec]
    problems: tuple[str, ...] = ()

    def box_reader(self) -> BoxReader:
        return BoxReader(self.path, self.index, self.shapes)

    def work(self) -> HashWork:
        """Every piece there is to hash."""
        return [(name, piece) for name in sorted(self.index) for piece in hash_pieces(self.shapes[name])]

    def raise_if_damaged(self, digests: FoundDigests) -> None:
        """Raise what is wrong, now that the values are hashed."""
        empty = [name for name, entry in self.ledger.items() if 0 in entry.shape]  # of these nothing is stored
        by_name: dict[str, dict[int, bytes | None]] = {name: {} for name in (*self.index, *empty)}
        for (name, first), found in digests.items():
            by_name[name][first] = found
        found = {name: ledger_entry(self.shapes[name], pieces) for name, pieces in by_name.items()}
        if problems := [*self.problems, *(each.text for each in compare_ledgers(self.ledger, found))]:
            raise DamagedCheckpoint(*problems)


def stored_specs(ledger: Ledger, index: ChunkIndex) -> dict[str, TensorSpec]:
    """What the files hold, by their own headers; the whole shapes are the ledger's where chunks lie inside of these."""
    lost = [entry for name, entry in ledger.items() if name not in index]
    found = {name: entry.what for name, entry in ledger.items()}
    for name, chunks in index.items():
        entry, held = ledger.get(name), sum(element_count(chunk.box) for chunk in chunks)
        if len({len(chunk.box) for chunk in chunks}) > 1:
            raise DamagedCheckpoint(f'chunks of "{printable_text(name)}" are of different dims')
        if (
            entry
            and all(box_fits_shape(chunk.box, entry.shape) for chunk in chunks)
            and prod(entry.shape) <= MOST_CLAIMED * held
        ):
            found[name] = TensorSpec(chunks[0].dtype, entry.shape, entry.experts is not None)
            continue
        shape = tuple(max(map(sum, ranges)) for ranges in zip(*(chunk.box for chunk in chunks), strict=True))
        if prod(shape) != held:
            raise DamagedCheckpoint(f'chunks of "{printable_text(name)}" hold {held} values, and do not make a tensor')
        alike = [each for each in ([entry] if entry else lost) if each.shape[1:] == shape[1:]]
        found[name] = TensorSpec(chunks[0].dtype, shape, any(each.experts is not None for each in alike))
    return found


def box_fits_shape(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(sum(ranges) <= size for ranges, size in zip(box, shape, strict=True))


def open_checkpoint(path: StoragePath) -> OpenedCheckpoint:
    """All files are there, of their size, and what is not a value is as it was written; or Damaged."""
    manifest = read_manifest(path)
    files = listed_files(manifest)
    if problems := [problem for name, (size, _) in files.items() if (problem := file_problem(path, name, size))]:
        raise DamagedCheckpoint(*problems)
    ledger = parse_ledger(read_verified(path, LEDGER_FILE, files[LEDGER_FILE][1]))
    state = parse_run_state(read_verified(path, STATE_FILE, files[STATE_FILE][1]))
    headers = {name: files[name][1] for name in tensor_data_files(files)}
    index, problems = read_chunk_index(path, headers)
    return OpenedCheckpoint(path, manifest, state, ledger, index, stored_specs(ledger, index), tuple(problems))


def file_problem(folder: StoragePath, name: str, size: int) -> str | None:
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


def read_verified(folder: StoragePath, name: str, sha256: str) -> bytes:
    raw = (folder / name).read_bytes()
    if sha256_digest(raw).hex() != sha256:
        raise DamagedCheckpoint(f"{name} does not match its digest: its content changed after it was written")
    return raw


def parse_run_state(raw: bytes) -> dict[str, Any]:
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{STATE_FILE} is not readable")
    return state


def hash_stored_pieces(opened: OpenedCheckpoint, work: HashWork) -> dict[tuple[str, int], bytes | None]:
    """The digests of these pieces, as the files have them now."""
    reader = opened.box_reader()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = pool.map(lambda each: reader.digest(*each), work)
        return {(name, piece.first): each for (name, piece), each in zip(work, found, strict=True)}


def verify_checkpoint(path: StoragePath) -> OpenedCheckpoint:
    """The checkpoint, if every byte of it is as it was written; or Damaged, with all that is wrong."""
    opened = open_checkpoint(path)
    opened.raise_if_damaged(hash_stored_pieces(opened, opened.work()))
    return opened
