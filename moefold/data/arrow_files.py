"""Arrow and Parquet files, zstd streams. Only this file uses pyarrow, which is optional: pip install 'moefold[data]'.

A column of texts gives texts, a column of lists of whole numbers gives token ids. Without a column rows are records.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moefold.config.errors import UserError
from moefold.data.entries import BadEntry, Entries, Entry, Record, TokenIds

ROWS_AT_A_TIME = 256
FILE_MAGIC = b"ARROW1"  # else the file is a stream, as the datasets library writes


class MissingPackage(UserError):
    """A package that a file needs is not installed: nothing to skip."""


def require_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingPackage(
            f"{path} needs the pyarrow library, which is not installed; run pip install 'moefold[data]'"
        ) from None
    return pyarrow


def open_zstd(path: Path) -> io.BufferedReader:
    """The decompressed bytes of a zstd file."""
    pyarrow = require_pyarrow(path)
    stream = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(stream)


def open_parquet(path: Path) -> Any:
    pyarrow = require_pyarrow(path)
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({first_line(error)}); write it again") from None


def parquet_group_bytes(path: Path) -> list[int]:
    """The decompressed bytes of each row group of a Parquet file."""
    facts = open_parquet(path).metadata
    sizes: list[int] = []
    for number in range(facts.num_row_groups):
        group = facts.row_group(number)
        sizes.append(group.total_byte_size)
    return sizes


def parquet_entries(path: Path, column: str | None, begin: int, end: int | None) -> Entries:
    """The entries of the row groups from `begin` to before `end`: values of a column, or records of all columns."""
    file = open_parquet(path)
    facts = file.metadata
    require_column(path, file.schema_arrow.names, column)
    last = facts.num_row_groups if end is None else end
    groups = list(range(begin, last))
    rows_before = 0
    for number in range(begin):
        group = facts.row_group(number)
        rows_before += group.num_rows
    columns = None if column is None else [column]
    batches = file.iter_batches(ROWS_AT_A_TIME, row_groups=groups, columns=columns)
    yield from column_entries(path, batches, column, rows_before)


def arrow_entries(path: Path, column: str | None) -> Entries:
    """The entries of an Arrow file or stream."""
    pyarrow = require_pyarrow(path)
    with path.open("rb") as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    source = pyarrow.memory_map(str(path))
    ipc = pyarrow.ipc
    open_source = ipc.open_file if is_file else ipc.open_stream
    try:
        opened = open_source(source)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Arrow ({first_line(error)}); write it again") from None
    require_column(path, opened.schema.names, column)
    batches = file_batches(opened) if is_file else opened
    yield from column_entries(path, batches, column, 0)


def file_batches(opened: Any) -> Iterator[Any]:
    for number in range(opened.num_record_batches):
        yield opened.get_batch(number)


def require_column(path: Path, names: list[str], column: str | None) -> None:
    if column is not None and column not in names:
        found = ", ".join(names)
        raise UserError(
            f'{path} has the columns {found}; expected a text in "{column}" (set data.text_key to change that)'
        )


def column_entries(path: Path, batches: Iterator[Any], column: str | None, rows_before: int) -> Entries:
    """The entries of one column, or of all. A batch that cannot be read ends the file."""
    pyarrow = require_pyarrow(path)
    row = rows_before
    make_entry = row_record if column is None else value_entry
    try:
        for batch in batches:
            batch.validate(full=True)  # of a damaged file pyarrow would read memory that is none of its own
            values = batch.to_struct_array() if column is None else batch.column(column)
            for value in values:
                row += 1
                yield make_entry(value, f"{path}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        yield BadEntry(f"{path} cannot be read behind row {row} ({first_line(error)})")


def value_entry(value: Any, place: str) -> Entry:
    try:
        content = value.as_py()
    except UnicodeDecodeError as error:
        return BadEntry(f"{place} is not UTF-8: byte at offset {error.start}")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        ids = np.asarray(content)
        if ids.dtype.kind == "i" or not content:
            return TokenIds(ids, place)
    found = "no value" if content is None else type(content).__name__
    return BadEntry(f"{place} holds {found}; expected a text, or a list of token ids")


def row_record(row: Any, place: str) -> Entry:
    try:
        fields = row.as_py()
    except UnicodeDecodeError as error:
        return BadEntry(f"{place} is not UTF-8: byte at offset {error.start}")
    return Record(fields, lambda: place)


def first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
