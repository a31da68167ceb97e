"""Headers of safetensors files, read and written. Torch-free.

    8 bytes    length of the header, little endian
    header     JSON: {name: {dtype, shape, data_offsets}}, padded with spaces to a multiple of 8 bytes
    data       the tensors, one after the other, without gaps

Headers are read by this file, within bounds, and not by a library: a file that contradicts itself is refused in one
line. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any

from moefold.checkpoint.format.storage import StoragePath
from moefold.config.errors import UserError, printable_text

LENGTH_BYTES = 8  # bytes of the length in front of a header
LONGEST_HEADER = 100 << 20  # bytes; the limit of the safetensors library
LARGEST_NUMBER = 1 << 62  # of any size or offset in a header
DTYPES_BY_SIZE = {
    8: ("F64", "I64", "U64"),
    4: ("F32", "I32", "U32"),
    2: ("F16", "BF16", "I16", "U16"),
    1: ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"),
}
DTYPE_BYTES = {dtype: size for size, dtypes in DTYPES_BY_SIZE.items() for dtype in dtypes}
MALFORMED_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: StoragePath
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a header. `begin` and `end` are bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def as_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data_offsets": [self.begin, self.end],
        }


def encode_safetensors_header(entries: Mapping[str, Any]) -> bytes:
    """The beginning of a file: the length of the header, and the header."""
    raw = json.dumps(entries).encode()
    raw += b" " * (-len(raw) % 8)  # tensors begin at multiples of eight
    return struct.pack("<Q", len(raw)) + raw


def read_raw_header(file: StoragePath) -> bytes:
    """The bytes of a file's header, if the length in front of it is plausible."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(LENGTH_BYTES)
        length = 0
        if len(prefix) == LENGTH_BYTES:
            (length,) = struct.unpack("<Q", prefix)
        longest = min(LONGEST_HEADER, size - LENGTH_BYTES)
        if not 2 <= length <= longest:
            raise UserError(
                f"{file} is no safetensors file: its header claims {length} bytes of {size}; fetch the file again"
            )
        return opened.read(length)


def tensors_in_file(file: StoragePath, raw: bytes | None = None) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, after checking that the file is as long as they need, to the byte."""
    if raw is None:
        raw = read_raw_header(file)
    try:
        entries = parse_header_entries(raw)
    except MALFORMED_JSON as error:
        reason = printable_text(str(error))
        raise UserError(f"{file} is no safetensors file: {reason}; fetch the file again") from None
    data_start = LENGTH_BYTES + len(raw)
    check_data_is_dense(file, data_start, list(entries.values()))
    tensors: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        offset = data_start + entry.begin
        stored = StoredTensor(file, entry.dtype, entry.shape, offset)
        tensors[name] = stored
    return tensors


def parse_header_entries(raw: bytes) -> dict[str, HeaderEntry]:
    content = json.loads(raw, object_pairs_hook=refuse_repeated_names)
    content.pop("__metadata__", None)
    return {name: parse_header_entry(entry) for name, entry in content.items()}


def parse_header_entry(entry: Mapping[str, Any]) -> HeaderEntry:
    dtype = entry["dtype"]
    shape = tuple(entry["shape"])
    offsets = tuple(entry["data_offsets"])
    if not is_sound_entry(dtype, shape, offsets):
        raise ValueError("a tensor's shape and place do not agree")
    return HeaderEntry(dtype, shape, *offsets)


def is_sound_entry(dtype: Any, shape: tuple[Any, ...], offsets: tuple[Any, ...]) -> bool:
    numbers = (*shape, *offsets)
    numbers_legal = all(map(is_legal_number, numbers))
    if dtype not in DTYPE_BYTES or len(offsets) != 2 or not numbers_legal:
        return False
    begin, end = offsets
    return end - begin == prod(shape) * DTYPE_BYTES[dtype]


def is_legal_number(number: Any) -> bool:
    return type(number) is int and 0 <= number < LARGEST_NUMBER


def refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name appears twice in its header")
    return content


def check_data_is_dense(file: StoragePath, data_start: int, entries: Sequence[HeaderEntry]) -> None:
    """Refuse a file whose tensors overlap, leave gaps, or end elsewhere than the file."""
    position = 0
    in_order = sorted(entries, key=attrgetter("begin", "end"))
    for entry in in_order:
        if entry.begin != position:
            raise UserError(
                f"{file} is damaged: its tensors overlap or leave gaps at byte {position}; fetch the file again"
            )
        position = entry.end
    # The last tensor must end where the file does.
    size = file.stat().st_size
    needed = data_start + position
    if size != needed:
        raise UserError(f"{file} has {size} bytes; its tensors need {needed}; fetch the file again")
