"""Metrics of a run: one JSON object a line, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

Record = dict[str, Any]  # of one step: `step` and its measurements

LONGEST_RECORD = 64 << 20  # bytes that are read at once; the parts of a longer line are no records
BLOCK_BYTES = 1 << 16  # read at once from the end of a file


class MetricsSink(Protocol):
    """A place that metrics are written to."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl` and `router.jsonl`: flushed after every line, so that a killed run leaves whole lines behind."""

    def __init__(self, path: Path, keep_through: int):
        """Continue a file, dropping what was written after step `keep_through` (that work is done again)."""
        break_links(path)
        self.file = path.open("a")
        kept = end_of_step(path, keep_through)
        self.file.truncate(kept)
        if kept and not ends_with_newline(path):
            self.file.write("\n")

    def write(self, record: Record) -> None:
        line = json.dumps(record)
        self.file.write(f"{line}\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_records(path: Path) -> list[Record]:
    """All records of a metrics file."""
    return list(iterate_records(path))


def iterate_records(path: Path) -> Iterator[Record]:
    """The records of a metrics file, one after the other; lines that are no record (one cut off by a crash) are
    skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while line := file.readline(LONGEST_RECORD):
            record = parse_record(line)
            if record is not None:
                yield record


def records_from_end(path: Path) -> Iterator[tuple[int, Record]]:
    """The records of a metrics file from the last to the first, each with the offset behind its line."""
    with path.open("rb") as file:
        for end, line in lines_from_end(file):
            record = parse_record(line)
            if record is not None:
                yield end, record


def lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Likewise its lines. A file of a long run is not read as a whole."""
    begin = end = file.seek(0, os.SEEK_END)
    held = b""  # the bytes from `begin` to `end`
    while begin:
        size = min(begin, max(BLOCK_BYTES, len(held)))
        begin = file.seek(begin - size)
        held = file.read(size) + held
        stop = len(held)
        while (cut := held.rfind(b"\n", 0, max(0, stop - 1))) >= 0:
            yield begin + stop, held[cut + 1 : stop]
            stop = cut + 1
        held = held[:stop]
        end = begin + stop
        if not begin or len(held) > LONGEST_RECORD:
            yield end, held
            held = b""
            end = begin


def break_links(path: Path) -> None:
    """Make a file that other names share, as after `cp -al`, a file of its own: it will be cut in place."""
    if path.exists() and (path.is_symlink() or path.stat().st_nlink > 1):
        own = path.with_suffix(".tmp")
        shutil.copyfile(path, own)
        os.replace(own, path)


def end_of_step(path: Path, step: int) -> int:
    """The offset behind the last record of a file that is of this step or an earlier one; records come in the order of
    their steps."""
    for end, record in records_from_end(path):
        if record["step"] <= step:
            return end
    return 0


def ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def last_step(path: Path) -> int:
    """The step of the last record; 0 where there is none."""
    if path.exists():
        for _, record in records_from_end(path):
            return record["step"]
    return 0


def parse_record(line: bytes) -> Record | None:
    """The record of a line; None where the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # brackets without end are no record either
        return None
    return record if is_record(record) else None


def is_record(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    step: Any = value.get("step")  # pyright: ignore[reportUnknownMemberType]
    return isinstance(step, int)


def curve_values(record: Record) -> dict[str, float]:
    """The numbers of a record by the name of their curve. Lists become one curve per layer."""
    values: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            for layer, layer_value in enumerate(value):
                values[f"{name}/layer_{layer}"] = layer_value
        elif name != "step":
            values[name] = value
    return values


class TensorBoard:
    """The one file that touches TensorBoard."""

    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=start)

    def write(self, record: Record) -> None:
        for name, value in curve_values(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()
