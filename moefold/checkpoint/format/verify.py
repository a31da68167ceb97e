"""Verification of a checkpoint: its files against the manifest, its values against the ledger. Torch-free.

Opening a checkpoint reads no values. Hashing them is a list of pieces that threads or ranks share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from moefold.checkpoint.format.boxes import Box, element_count
from moefold.checkpoint.format.ledger import (
    Digest,
    HashPiece,
    Ledger,
    LedgerEntry,
    PieceDigests,
    TensorSpec,
    compare_ledgers,
    hash_pieces,
    ledger_entry,
    parse_ledger,
)
from moefold.checkpoint.format.manifest import (
    LEDGER_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    listed_files,
    read_manifest,
    sha256_hex,
    tensor_data_files,
)
from moefold.checkpoint.format.reader import BoxReader, ChunkIndex, StoredChunk, read_chunk_index
from moefold.checkpoint.format.storage import StoragePath
from moefold.config.errors import printable_text

LARGEST_METADATA = 1 << 30  # bytes of a ledger; some hundred for each tensor and expert
LARGEST_POSITION = 1 << 62  # of a step, or of sequences consumed
BEGUN_AFTER = "begun_after"  # in the state: by parameter, the updates before its optimizer states, if any
MOST_CLAIMED = 1 << 10  # a ledger that claims more than this many times a tensor's stored values is not believed

HashWork = list[tuple[str, HashPiece]]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose files are all there. `problems`: what is known to be wrong before any value is read."""

    path: StoragePath
    manifest: dict[str, Any]
    state: dict[str, Any]
    ledger: Ledger
    index: ChunkIndex
    specs: dict[str, TensorSpec]
    problems: tuple[str, ...] = ()

    def box_reader(self) -> BoxReader:
        return BoxReader(self.path, self.index, self.specs)

    def pieces_to_hash(self) -> HashWork:
        """Every piece of every stored tensor, with the tensor's name."""
        pieces: HashWork = []
        for name in sorted(self.index):
            spec = self.specs[name]
            pieces += [(name, piece) for piece in hash_pieces(spec)]
        return pieces

    def raise_if_damaged(self, digests: PieceDigests) -> None:
        """Compare the digests of all pieces with the ledger, and raise every problem."""
        by_name: dict[str, dict[int, Digest]] = {}
        for name in self.index:
            by_name[name] = {}
        for (name, first), digest in digests.items():
            by_name[name][first] = digest
        # Nothing is stored of tensors without elements: they are intact.
        for name, entry in self.ledger.items():
            if 0 in entry.shape:
                by_name.setdefault(name, {})
        actual: Ledger = {}
        for name, pieces in by_name.items():
            actual[name] = ledger_entry(self.specs[name], pieces)
        problems = list(self.problems)
        for difference in compare_ledgers(self.ledger, actual):
            problems.append(difference.text)
        if problems:
            raise DamagedCheckpoint(*problems)


def stored_specs(ledger: Ledger, index: ChunkIndex) -> dict[str, TensorSpec]:
    """The spec of every tensor: the dtype from the files' headers, the shape from the ledger where the chunks fit it,
    otherwise from the chunks."""
    lost: list[LedgerEntry] = []
    specs: dict[str, TensorSpec] = {}
    for name, entry in ledger.items():
        specs[name] = entry.spec
        if name not in index:
            lost.append(entry)
    for name, chunks in index.items():
        dims = {len(chunk.box) for chunk in chunks}
        if len(dims) > 1:
            raise DamagedCheckpoint(f'chunks of "{printable_text(name)}" are of different dims')
        entry = ledger.get(name)
        if entry and chunks_fit_entry(chunks, entry):
            dtype = chunks[0].dtype
            specs[name] = entry.spec._replace(dtype=dtype)
        else:
            # Renamed or reshaped: a lost tensor of the same inner shape says whether dim 0 counts experts.
            candidates = [entry] if entry else lost
            specs[name] = spec_from_chunks(name, chunks, candidates)
    return specs


def chunks_fit_entry(chunks: Sequence[StoredChunk], entry: LedgerEntry) -> bool:
    claimed = prod(entry.shape)
    shape = entry.shape
    inside = all(box_fits_shape(chunk.box, shape) for chunk in chunks)
    return inside and claimed <= MOST_CLAIMED * stored_elements(chunks)


def spec_from_chunks(name: str, chunks: Sequence[StoredChunk], candidates: Sequence[LedgerEntry]) -> TensorSpec:
    """The spec of a tensor that is exactly these chunks."""
    boxes = [chunk.box for chunk in chunks]
    ranges_by_dim = zip(*boxes, strict=True)
    ends = [max(map(sum, ranges)) for ranges in ranges_by_dim]
    shape = tuple(ends)
    stored = stored_elements(chunks)
    if prod(shape) != stored:
        raise DamagedCheckpoint(f'chunks of "{printable_text(name)}" hold {stored} values, and do not make a tensor')
    stacked = False
    for entry in candidates:
        same_inner = entry.shape[1:] == shape[1:]
        if same_inner and entry.experts is not None:
            stacked = True
    return TensorSpec(chunks[0].dtype, shape, stacked)


def stored_elements(chunks: Sequence[StoredChunk]) -> int:
    counts = [element_count(chunk.box) for chunk in chunks]
    return sum(counts)


def box_fits_shape(box: Box, shape: Sequence[int]) -> bool:
    if len(box) != len(shape):
        return False
    ends = map(sum, box)
    pairs = zip(ends, shape, strict=True)
    return all(end <= size for end, size in pairs)


def open_checkpoint(path: StoragePath) -> OpenedCheckpoint:
    """Check that all files are there and of their size, and that all but the values is as it was written. Raises
    DamagedCheckpoint otherwise."""
    manifest = read_manifest(path)
    files = listed_files(manifest)
    file_problems: list[str] = []
    sha256: dict[str, str] = {}
    # Names, links and sizes first: no file is opened before they are right.
    for name, (size, digest) in files.items():
        sha256[name] = digest
        problem = file_problem(path, name, size)
        if problem:
            file_problems.append(problem)
    if file_problems:
        raise DamagedCheckpoint(*file_problems)
    raw_ledger = read_verified(path, LEDGER_FILE, sha256[LEDGER_FILE])
    raw_state = read_verified(path, STATE_FILE, sha256[STATE_FILE])
    ledger = parse_ledger(raw_ledger)
    state = parse_run_state(raw_state)
    # Of the files of tensors only the headers are read here.
    headers = {name: sha256[name] for name in tensor_data_files(files)}
    index, problems = read_chunk_index(path, headers)
    specs = stored_specs(ledger, index)
    found = tuple(problems)
    return OpenedCheckpoint(path, manifest, state, ledger, index, specs, found)


def file_problem(folder: StoragePath, name: str, size: int) -> str | None:
    """The problem of a file that can be seen without opening it."""
    if "/" in name or not name.isprintable() or name in ("", ".", ".."):
        return f'"{printable_text(name)}" is no name of a file'
    file = folder / name
    if file.is_symlink():
        return f"{name} is a link; expected the file itself"
    if not file.is_file():
        return f"{name} is missing"
    actual = file.stat().st_size
    if actual != size:
        return f"{name} has {actual} bytes; expected {size}"
    return None


def read_verified(folder: StoragePath, name: str, sha256: str) -> bytes:
    file = folder / name
    if file.stat().st_size > LARGEST_METADATA:
        raise DamagedCheckpoint(f"{name} has more than {LARGEST_METADATA >> 20} MiB")
    raw = file.read_bytes()
    if sha256_hex(raw) != sha256:
        raise DamagedCheckpoint(f"{name} does not match its digest: its content changed after it was written")
    return raw


def parse_run_state(raw: bytes) -> dict[str, Any]:
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{STATE_FILE} is not readable")
    return cast(dict[str, Any], state)


def require_run_position(state: Mapping[str, Any]) -> None:
    """Refuse a state that no run can continue from."""
    for name in ("step", "consumed"):
        require_count(name, state.get(name))
    for name in ("config", "sources", BEGUN_AFTER):
        if not isinstance(state.get(name, {}), dict) or "config" not in state:
            raise DamagedCheckpoint(f"{STATE_FILE} has no names with values under {name}")
    for name, updates in state.get(BEGUN_AFTER, {}).items():
        require_count(f"{BEGUN_AFTER} of {printable_text(name)}", updates)


def require_count(name: str, number: object) -> None:
    if type(number) is not int or not 0 <= number < LARGEST_POSITION:
        shown = printable_text(repr(number))
        raise DamagedCheckpoint(f"{STATE_FILE} has {name} = {shown}; expected a whole number from 0 on")


def hash_stored_pieces(opened: OpenedCheckpoint, work: HashWork) -> PieceDigests:
    """The digests of these pieces, read from the files."""
    reader = opened.box_reader()
    names = [name for name, _ in work]
    pieces = [piece for _, piece in work]
    keys = [(name, piece.first) for name, piece in work]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        digests = pool.map(reader.piece_digest, names, pieces)
        return dict(zip(keys, digests, strict=True))


def verify_checkpoint(path: StoragePath) -> OpenedCheckpoint:
    """Open a checkpoint and hash every byte of it. Raises DamagedCheckpoint with all problems."""
    opened = open_checkpoint(path)
    digests = hash_stored_pieces(opened, opened.pieces_to_hash())
    opened.raise_if_damaged(digests)
    return opened
