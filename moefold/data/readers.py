"""Readers of files, by their suffix. Each yields the entries of a piece of a file in order.

| suffix | entries | pieces |
|---|---|---|
| .jsonl | one a line, a field | ranges of bytes |
| .jsonl.gz, .jsonl.zst, .gz and .zst of text | as without the last suffix | the file |
| .parquet, .arrow | one a row, a column | row groups; the file |
| .npy | one a row of a matrix; a vector is cut behind end tokens | the file |
| .bin with .idx (Megatron) | one a document | the file |
| any other | the text of the file | the file |
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from moefold.config.errors import UserError, printable_text
from moefold.config.run import DataConfig
from moefold.data.arrow_files import (
    MissingPackage,
    arrow_entries,
    open_zstd,
    parquet_entries,
    parquet_group_bytes,
)
from moefold.data.entries import BadEntry, Entries, Entry, Record, TokenIds
from moefold.data.file_kinds import file_kind
from moefold.data.megatron import data_and_index, megatron_entries

RECORD_SUFFIXES = (".jsonl", ".parquet", ".arrow")  # also compressed
LARGEST_TEXT = 1 << 30  # bytes of one document out of a compressed file: a small file may hold any number of them
SHOWN_LETTERS = 200  # of another library's message
KIND_BYTES = 4096  # of a file's beginning, by which its kind is recognised
BROKEN_STREAM = (EOFError, OSError, zlib.error)


class Piece(NamedTuple):
    """A part of a file: bytes of lines, or row groups, from `begin` to before `end`; None: to the end."""

    path: Path
    begin: int = 0
    end: int | None = None


class FileFormat(NamedTuple):
    """How files of a suffix are read, and how they are cut into pieces of about so many bytes."""

    read: Callable[[Piece, str | None], Entries]
    cut: Callable[[Path, int], list[Piece]]


def field_to_read(data: DataConfig) -> str | None:
    """The field that holds the text; None where samples are made of whole records."""
    return data.text_key if data.format == "text" else None


def read_piece(piece: Piece, field: str | None) -> Entries:
    """The entries of a piece: texts of a field, or records. A file that cannot be read at all is one bad entry."""
    try:
        if field is None:
            refuse_without_records(piece.path)
        yield from file_format(piece.path).read(piece, field)
    except MissingPackage:
        raise
    except UserError as error:
        yield BadEntry(str(error))
    except FileNotFoundError:
        yield BadEntry(f"no file {piece.path}; expected a text or .jsonl file or a folder of them")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = printable_text(str(piece.path))
        yield BadEntry(f"cannot read {shown}: {reason}; expected a readable file")


def cut_file(path: Path, piece_bytes: int) -> list[Piece]:
    return file_format(path).cut(path, piece_bytes)


def file_format(path: Path) -> FileFormat:
    suffix = path.suffix
    data, index = data_and_index(path)
    is_pair = data.is_file() and index.is_file()
    if is_pair and path in (data, index):
        return MEGATRON_FORMAT
    return FORMATS.get(suffix, TEXT_FORMAT)


def refuse_without_records(path: Path) -> None:
    """Refuse a file that has no fields, from which chats and pairs are made."""
    inner = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
    if inner.suffix not in RECORD_SUFFIXES:
        suffixes = ", ".join(RECORD_SUFFIXES)
        raise UserError(f"{path} has no fields for data.format; expected a file of kind {suffixes}, or set it to text")


def whole_file(path: Path, piece_bytes: int) -> list[Piece]:
    return [Piece(path)]


# Lines of JSON.


def read_jsonl(piece: Piece, field: str | None) -> Entries:
    with piece.path.open("rb") as file:
        refuse_other_kind(piece.path, file.read(KIND_BYTES))
        lines = lines_from(file, piece.begin, piece.end)
        yield from jsonl_entries(piece, lines, field)


def lines_from(
    file: IO[bytes],
    begin: int,
    end: int | None,
) -> Iterator[bytes]:
    """The lines that begin at `begin` or behind it and before `end`."""
    position = max(0, begin - 1)
    file.seek(position)
    if begin > 0:
        position += len(file.readline())
    while end is None or position < end:
        line = file.readline()
        if not line:
            return
        position += len(line)
        yield line


class LinePlaces:
    """Numbers of lines in a file, for messages: lines before a piece are counted when a number is first needed."""

    def __init__(self, piece: Piece):
        self.piece = piece

    @cached_property
    def lines_before(self) -> int:
        if self.piece.begin == 0:
            return 0
        with self.piece.path.open("rb") as file:
            lines = lines_from(file, 0, self.piece.begin)
            return sum(1 for _ in lines)

    def name(self, number: int) -> str:
        return f"{self.piece.path}, line {self.lines_before + number}"


def jsonl_entries(piece: Piece, lines: Iterable[bytes], field: str | None) -> Entries:
    places = LinePlaces(piece)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield line_entry(line, field, places, number)


def line_entry(
    line: bytes,
    field: str | None,
    places: LinePlaces,
    number: int,
) -> Entry:
    try:
        content = read_json_line(line)
        if field is None:
            record = require_record(content)
            return Record(record, partial(places.name, number))
        return text_of(content, field)
    except ValueError as error:
        return BadEntry(f"{places.name(number)} {error}")


def read_json_line(line: bytes) -> Any:
    """What one line holds. Refuses with a ValueError that completes "FILE, line N ..."."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start} of the line") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({str(error)[:100]}); expected one object a line") from None


def require_record(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError("is no object; expected one with the fields of a sample")
    refuse_half_pairs(json.dumps(content, ensure_ascii=False))
    return content


def text_of(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f'is no object; expected a text in "{field}" (set data.text_key to change that)')
    text = record.get(field)
    if not isinstance(text, str):
        names = ", ".join(map(str, record))
        raise ValueError(f'has the fields {names}; expected a text in "{field}" (set data.text_key to change that)')
    refuse_half_pairs(text)
    return text


def refuse_half_pairs(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character; mend or remove that line") from None


def cut_lines(path: Path, piece_bytes: int) -> list[Piece]:
    size = path.stat().st_size
    pieces: list[Piece] = []
    for begin in range(0, size, piece_bytes):
        end = min(size, begin + piece_bytes)
        piece = Piece(path, begin, end)
        pieces.append(piece)
    return pieces


# Text and compressed files.


def read_text(piece: Piece, field: str | None) -> Entries:
    raw = piece.path.read_bytes()
    yield from text_entries(piece.path, raw)


def text_entries(path: Path, raw: bytes) -> Entries:
    refuse_other_kind(path, raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "if it is text in another encoding, convert it, for instance with iconv -f latin1 -t utf-8"
        ) from None
    if text.strip():
        yield text


def refuse_other_kind(path: Path, raw: bytes) -> None:
    """Refuse bytes that are no text."""
    kind = file_kind(path, raw)
    if kind is not None:
        raise UserError(
            f"{path} is {kind.article_and_name}; expected UTF-8 text or .jsonl; {kind.advice}, then name the result"
        )


def read_gzip(piece: Piece, field: str | None) -> Entries:
    with gzip.open(piece.path, "rb") as file:
        yield from stream_entries(piece, file, field)  # pyright: ignore[reportArgumentType]


def read_zstd(piece: Piece, field: str | None) -> Entries:
    with closing(open_zstd(piece.path)) as file:
        yield from stream_entries(piece, file, field)


def stream_entries(piece: Piece, file: IO[bytes], field: str | None) -> Entries:
    """The entries of a decompressed file, whose kind is that of the name without the last suffix."""
    inner = piece.path.with_suffix("")
    if inner.suffix == ".jsonl":
        stream = SoundLines(file)
        yield from jsonl_entries(piece, stream, field)
        if stream.broken is not None:
            yield BadEntry(f"{piece.path} breaks off behind line {stream.count}: {stream.broken}; copy it again")
        return
    try:
        raw = file.read(LARGEST_TEXT + 1)
    except BROKEN_STREAM as error:
        raise UserError(f"{piece.path} breaks off: {error}; copy it again") from None
    if len(raw) > LARGEST_TEXT:
        raise UserError(f"{piece.path} holds more than {LARGEST_TEXT >> 20} MiB in one text; cut it into several")
    yield from text_entries(inner, raw)


class SoundLines:
    """Lines of a stream up to its end or to where it breaks. `broken`: why; `count`: the lines before."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.count = 0
        self.broken: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                line = self.file.readline(LARGEST_TEXT + 1)
            except BROKEN_STREAM as error:
                self.broken = error
                return
            if len(line) > LARGEST_TEXT:
                self.broken = ValueError(f"a line of more than {LARGEST_TEXT >> 20} MiB")
            if not line or self.broken:
                return
            self.count += 1
            yield line


# Tables and token ids.


def read_parquet(piece: Piece, field: str | None) -> Entries:
    yield from parquet_entries(piece.path, field, piece.begin, piece.end)


def cut_row_groups(path: Path, piece_bytes: int) -> list[Piece]:
    """Pieces of whole row groups of a Parquet file."""
    pieces: list[Piece] = []
    begin = filled = 0
    sizes = parquet_group_bytes(path)
    for number, size in enumerate(sizes, start=1):
        filled += size
        if filled >= piece_bytes or number == len(sizes):
            pieces.append(Piece(path, begin, number))
            begin, filled = number, 0
    return pieces


def read_arrow(piece: Piece, field: str | None) -> Entries:
    yield from arrow_entries(piece.path, field)


def read_megatron(piece: Piece, field: str | None) -> Entries:
    yield from megatron_entries(piece.path)


def read_numpy(piece: Piece, field: str | None) -> Entries:
    """Rows of a matrix of token ids, or a vector of them. Objects, which numpy would unpickle, are refused."""
    path = piece.path
    try:
        ids = np.load(path, mmap_mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, and so fails in many ways
        reason = printable_text(str(error))[:SHOWN_LETTERS]
        raise UserError(f"{path} is no array of numbers ({reason}); expected token ids") from None
    is_whole = ids.dtype.kind in "iu"
    if not is_whole or ids.ndim not in (1, 2):
        raise UserError(f"{path} holds {ids.dtype} {list(ids.shape)}; expected whole numbers, one or two dimensions")
    if ids.ndim == 1:
        yield TokenIds(ids, str(path))
        return
    for number, row in enumerate(ids):
        yield TokenIds(row, f"{path}, row {number}")


TEXT_FORMAT = FileFormat(read_text, whole_file)
MEGATRON_FORMAT = FileFormat(read_megatron, whole_file)
FORMATS = {
    ".jsonl": FileFormat(read_jsonl, cut_lines),
    ".gz": FileFormat(read_gzip, whole_file),
    ".zst": FileFormat(read_zstd, whole_file),
    ".parquet": FileFormat(read_parquet, cut_row_groups),
    ".arrow": FileFormat(read_arrow, whole_file),
    ".npy": FileFormat(read_numpy, whole_file),
}
