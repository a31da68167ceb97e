"""Megatron-LM's indexed data: PREFIX.bin with the tokens, PREFIX.idx with lengths, places and documents.

    .idx   "MMIDIDX" and two zero bytes, u64 version 1, u8 token type, u64 sequences, u64 documents + 1,
           i32 length of each sequence, i64 byte offset of each sequence, i64 first sequence of each document

Everything is little-endian. A document is one or more sequences; nothing is unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moefold.config.errors import UserError
from moefold.data.entries import BadEntry, Entries, Entry, TokenIds

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
FIXED_PART = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SMALL_VOCABULARY = 65_500  # below, Megatron stores two bytes a token


class MegatronIndex(NamedTuple):
    """The content of an .idx file."""

    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray


def data_and_index(path: Path) -> tuple[Path, Path]:
    data = path.with_suffix(".bin")
    index = path.with_suffix(".idx")
    return data, index


def read_megatron_index(path: Path) -> MegatronIndex:
    raw = path.read_bytes()
    if len(raw) < FIXED_PART.size:
        raise UserError(f"{path} has {len(raw)} bytes; expected a Megatron index of at least {FIXED_PART.size}")
    magic, version, code, sequences, documents = FIXED_PART.unpack_from(raw)
    if magic != MAGIC or version != VERSION:
        raise UserError(f"{path} does not begin as a Megatron index of version {VERSION}; write it again")
    if code not in TOKEN_TYPES:
        raise UserError(f"{path} has token type {code}; expected one of {', '.join(map(str, TOKEN_TYPES))}")
    needed = FIXED_PART.size + 12 * sequences + 8 * documents
    if len(raw) < needed:
        raise UserError(f"{path} breaks off at offset {len(raw)}; expected {needed} bytes; copy or write it again")
    dtype = np.dtype(TOKEN_TYPES[code])
    columns = ("<i4", sequences), ("<i8", sequences), ("<i8", documents)
    arrays: list[np.ndarray] = []
    place = FIXED_PART.size
    for stored_type, count in columns:
        array = np.frombuffer(raw, stored_type, count, place)
        arrays.append(array)
        place += array.nbytes
    return MegatronIndex(dtype, *arrays)


def megatron_entries(path: Path) -> Entries:
    """The documents of PREFIX.bin. `path` is either file of the pair."""
    data, index_path = data_and_index(path)
    index = read_megatron_index(index_path)
    tokens = map_tokens(data, index.dtype)
    bounds = index.documents.tolist()
    sequences = len(index.lengths)
    if not bounds or bounds[-1] != sequences:
        bounds.append(sequences)  # some writers leave out where the last document ends
    if bounds[0] < 0 or any(first > last for first, last in pairwise(bounds)):
        raise UserError(f"{index_path} has documents that do not follow one another; write it again")
    for number, (first, last) in enumerate(pairwise(bounds)):
        place = f"{data}, document {number}"
        if first < last:
            yield document_entry(tokens, index, first, last, place)


def map_tokens(data: Path, dtype: np.dtype) -> np.ndarray:
    """The tokens of a .bin file, without a last one that is not whole."""
    whole = data.stat().st_size // dtype.itemsize
    if not whole:
        return np.empty(0, dtype)  # nothing cannot be mapped
    return np.memmap(data, dtype, "r", shape=(whole,))


def document_entry(
    tokens: np.ndarray,
    index: MegatronIndex,
    first: int,
    last: int,
    place: str,
) -> Entry:
    """The tokens of the sequences from `first` to before `last`."""
    size = index.dtype.itemsize
    parts: list[np.ndarray] = []
    for sequence in range(first, last):
        offset = int(index.offsets[sequence])
        length = int(index.lengths[sequence])
        start = offset // size
        stop = start + length
        if offset < 0 or length < 0:
            return BadEntry(f"{place} has {length} tokens at offset {offset}; expected numbers from 0 on")
        if stop > len(tokens):
            return BadEntry(f"{place} ends at offset {stop * size}; expected at most {len(tokens) * size}")
        parts.append(tokens[start:stop])
    ids = parts[0]
    if len(parts) > 1:
        ids = np.concatenate(parts)
    return TokenIds(ids, place)


def write_megatron(
    prefix: Path,
    documents: Iterable[np.ndarray],
    vocab: int,
) -> int:
    """Write documents as PREFIX.bin and PREFIX.idx, one sequence each. Returns their number."""
    data = prefix.with_name(f"{prefix.name}.bin")
    index_path = prefix.with_name(f"{prefix.name}.idx")
    code = 8 if vocab < SMALL_VOCABULARY else 4
    dtype = np.dtype(TOKEN_TYPES[code])
    sizes: list[int] = []
    with data.open("wb") as file:
        for document in documents:
            stored = document.astype(dtype)
            file.write(stored.tobytes())
            sizes.append(len(stored))
    count = len(sizes)
    lengths = np.asarray(sizes, "<i4")
    ends = np.cumsum(lengths, dtype="<i8")
    starts = ends - lengths
    offsets = starts * dtype.itemsize
    firsts = np.arange(count + 1, dtype="<i8")
    with index_path.open("wb") as file:
        sizes_stated = (count, len(firsts))
        fixed = FIXED_PART.pack(MAGIC, VERSION, code, *sizes_stated)
        file.write(fixed)
        for array in (lengths, offsets, firsts):
            file.write(array.tobytes())
    return count
