"""What a rank needs around it: its launcher, a reader of its output, the folder of its run. Each check gives a stop
request when that is gone."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from moefold.layout.environment import parent_pid
from moefold.layout.spawn import signal_exit_code
from moefold.watch.stop_requests import StopRequest

READER_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal
LOOKS_BEFORE_GONE = 3  # a folder that is being renamed or remounted is missed for a moment only

Check = Callable[[], StopRequest | None]


def launcher_check(env: Mapping[str, str]) -> Check:
    """A check that the launcher of this rank lives. A process without one has nobody to miss. A starter of warm ranks
    ends with its launcher."""
    parent = parent_pid(env)

    def missing_launcher() -> StopRequest | None:
        if parent is None or os.getppid() == parent:
            return None
        return StopRequest("the launcher is gone", signal_exit_code(signal.SIGHUP))

    return missing_launcher


class FolderCheck:
    """A check that a folder exists, and is the one that was there at first."""

    def __init__(self, folder: Path, saves: bool):
        self.folder = folder
        self.saves = saves
        self.first = folder_identity(folder)
        self.misses = 0

    def __call__(self) -> StopRequest | None:
        same = folder_identity(self.folder) == self.first
        self.misses = 0 if same else self.misses + 1
        if self.misses < LOOKS_BEFORE_GONE:
            return None
        return StopRequest(f"{self.folder} has vanished", 1, self.saves)


def folder_identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder; None where there is none. Other errors, as of a network disk, are no answer."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


class UnreadOutput(io.FileIO):
    """An output file that goes on when its reader is gone: what nobody can read is dropped."""

    lost_reader = False

    def write(self, data) -> int:  # pyright: ignore[reportIncompatibleMethodOverride, reportMissingParameterType]
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in READER_GONE:
                raise
            self.lost_reader = True
            return len(data)


class OutputCheck:
    """A check that somebody can read this rank's standard output."""

    def __init__(self, output: UnreadOutput):
        self.output = output
        self.pipe = select.poll()
        self.pipe.register(output.fileno(), 0)  # errors are reported without being asked for

    def __call__(self) -> StopRequest | None:
        gone = select.POLLERR | select.POLLHUP
        closed = any(event & gone for _, event in self.pipe.poll(0))
        if not closed and not self.output.lost_reader:
            return None
        return StopRequest("standard output was closed", signal_exit_code(signal.SIGPIPE))


@contextmanager
def unread_output_dropped() -> Iterator[Check | None]:
    """Standard output and errors may lose their readers inside the block. Yields the check of standard output, or None
    where it is no file, as under a test runner."""
    former = sys.stdout, sys.stderr
    try:
        outputs = [UnreadOutput(stream.fileno(), "wb", closefd=False) for stream in former]
    except (OSError, AttributeError):
        yield None
        return
    sys.stdout, sys.stderr = [text_stream(output, like) for output, like in zip(outputs, former, strict=True)]
    try:
        yield OutputCheck(outputs[0])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = former


def text_stream(output: UnreadOutput, like: TextIO) -> TextIO:
    like.flush()
    return io.TextIOWrapper(io.BufferedWriter(output), like.encoding, like.errors, line_buffering=True)
