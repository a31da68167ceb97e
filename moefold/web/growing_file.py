"""Records of a file that a run still writes: each read gives those that are new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moefold.observe.metrics import LONGEST_RECORD, Record, parse_record

TAIL_BYTES = 256  # the last ones read, by which a file that was written anew is known


class GrowingFile:
    """A file of JSON lines, read from where the last read has ended.

    A resumed run cuts its files: without the lines behind its checkpoint, then with others. Such a file is
    shorter than what was read, or its bytes there differ.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        self.tail = b""

    def has_changed_before(self) -> bool:
        """Whether what was read is no longer in the file. A file that is absent has not changed."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset - len(self.tail))
                return file.read(len(self.tail)) != self.tail
        except FileNotFoundError:
            return False

    def new_records(self) -> Iterator[Record]:
        """The records behind the last read. A line that has not ended waits for the next read."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in self.new_lines(file):
                record = parse_record(line)
                if record is not None:
                    yield record

    def new_lines(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline(LONGEST_RECORD):
            is_cut = not line.endswith(b"\n") and len(line) < LONGEST_RECORD
            if is_cut and parse_record(line) is None:
                return
            self.offset += len(line)
            self.tail = (self.tail + line[-TAIL_BYTES:])[-TAIL_BYTES:]
            yield line
