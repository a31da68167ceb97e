"""The owner of a run's folder: one process at a time writes into it.

Rank 0 locks the file `owner.json` for as long as the run lasts, and writes its host and process number there for the
message to a second run. The system releases the lock of a process that is killed: what such a process left is stale,
and the next run takes the folder over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from moefold.config.errors import UserError, printable_text

OWNER_FILE = "owner.json"
LONGEST_OWNER_FILE = 4096
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of a file system without them


@dataclass(frozen=True)
class Owner:
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def may_be_alive(self) -> bool:
        """Whether the process may live, where no lock can tell."""
        if self.host != socket.gethostname():
            return True
        return Path(f"/proc/{self.pid}").exists()


class FolderClaims:
    """The folders that this process owns."""

    def __init__(self) -> None:
        self.locked: list[TextIO] = []

    def claim(self, folder: Path) -> None:
        """Become the owner of a folder. A folder that another run writes into is refused by its owner."""
        path = folder / OWNER_FILE
        file = path.open("a+", encoding="utf-8")
        has_locks = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(in_use(folder, read_owner(file))) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            has_locks = False
        former = read_owner(file)
        if not has_locks and former and former.may_be_alive:
            raise UserError(f"{in_use(folder, former)}; if that run is over, delete {path}")
        self.locked.append(file)
        here = Owner(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))
        write_owner(file, json.dumps(asdict(here)))

    def release(self) -> None:
        """Give the folders back. The files stay: a new file of the same name would be another lock."""
        for file in self.locked:
            write_owner(file, "")
            file.close()
        self.locked.clear()


@contextmanager
def folder_claims() -> Iterator[FolderClaims]:
    claims = FolderClaims()
    try:
        yield claims
    finally:
        claims.release()


def in_use(folder: Path, owner: Owner | None) -> str:
    by = str(owner) if owner else "another process"
    return f"{folder} is in use by {by}; expected a folder of no other run; stop that run, or choose another --out"


def write_owner(file: TextIO, text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def read_owner(file: TextIO) -> Owner | None:
    """The owner that the file names; None where it is empty or names none."""
    file.seek(0)
    try:
        raw = json.loads(file.read(LONGEST_OWNER_FILE))
        host = printable_text(raw["host"])
        since = printable_text(raw["since"])
        return Owner(host, int(raw["pid"]), since)
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError):
        return None
