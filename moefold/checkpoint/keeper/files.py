"""Kept files: the memory of all keepers as a file system for checkpoints, with the methods that `RemotePath` asks of an
fsspec one. Torch-free.

    write    to the keeper of this node, and to that of the next node, which has another fate
    read     from the keeper of this node, else from the first other one that has the file
    list     what any keeper has
    check    by every keeper: a copy that has changed is dropped, so that the other one is read
    remove   at every keeper

An object store cannot rename: the manifest, written last, makes files a checkpoint (format/storage.py). Each file is at
both of its keepers before the write returns, so a checkpoint with a manifest is whole there.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from moefold.checkpoint.keeper.messages import (
    LostConnection,
    Message,
    close_all,
    receive_bytes,
    receive_message,
    send_file_bytes,
    send_message,
)
from moefold.checkpoint.keeper.piece_writer import PieceWriter
from moefold.config.errors import UserError
from moefold.layout.environment import launcher_pid

PROTOCOL = "keepers:"  # in front of a path that is shown
PATIENCE = 30.0  # seconds that a keeper has for an answer
LONGEST_IDLE = 20.0  # seconds of a connection: a keeper closes it after a minute
PATIENCE_TO_CHECK = 600.0  # likewise, where it reads all that it holds
COPIES = 2  # of each file, on two nodes, where there are two
GENERATIONS = 2  # the checkpoint before stays until the new one is whole
WHOLE = 1 << 62  # the end of any file
BOOT_FILE = "/proc/sys/kernel/random/boot_id"
PROCESSES_FILE = "/proc/self/ns/pid"


@dataclass(frozen=True)
class KeeperAddress:
    """A keeper: its name on its own machine; for other nodes host, port and secret."""

    name: str
    host: str = ""
    port: int = 0
    secret: str = ""


@cache
def keeper_name(launcher: int) -> str:
    """The name of the keeper of a launcher's ranks: another one for each machine, container, user and launcher."""
    boot = Path(BOOT_FILE).read_text()
    processes = os.stat(PROCESSES_FILE).st_ino
    identity = f"{boot} {processes} {os.getuid()} {launcher}"
    return f"moefold-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def start_keeper(name: str, launcher: int, limit: int, serves: bool) -> None:
    """Start the keeper of this node. It is a child of no rank, in a session of its own."""
    module = "moefold.checkpoint.keeper.process"
    command = [sys.executable, "-m", module, name, str(launcher), str(limit), str(int(serves))]
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere, setsid=True)
    _, status = os.waitpid(pid, 0)
    if status:
        raise UserError("the keeper of checkpoints in memory did not start; set checkpoint.memory_every to 0")


def greet_keeper(name: str) -> Message:
    """Port and secret of this machine's keeper of that name."""
    answer, _ = ask_keeper(KeeperAddress(name), {"verb": "hello"})
    return answer


def empty_keeper(launcher: int) -> None:
    """Forget all that the keeper of a launcher's ranks holds, if there is one."""
    with suppress(OSError):
        ask_keeper(KeeperAddress(keeper_name(launcher)), {"verb": "remove", "under": ""})


def is_here(keeper: KeeperAddress) -> bool:
    return not keeper.host


def ask_keeper(keeper: KeeperAddress, request: Message, patience: float = PATIENCE) -> tuple[Message, list[int]]:
    with keeper_connection(keeper) as connection:
        connection.settimeout(patience)
        return exchange(connection, keeper, request)


IdleConnection = tuple[socket.socket, float]  # with the time since when


def is_closed(connection: socket.socket) -> bool:
    """Whether the keeper has closed an idle connection: it sends nothing unasked."""
    watch = select.poll()
    watch.register(connection, select.POLLIN)
    return bool(watch.poll(0))


class IdleConnections:
    """Connections of this process to keepers that no request uses: a checkpoint makes some dozens of requests. Those of
    a parent process are not used after a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_owner: dict[tuple[int, KeeperAddress], list[IdleConnection]] = {}

    def take(self, keeper: KeeperAddress) -> socket.socket | None:
        """A connection that its keeper has not closed."""
        owner = os.getpid(), keeper
        with self.lock:
            idle = self.by_owner.get(owner, [])
            while idle:
                connection, since = idle.pop()
                if time.monotonic() - since < LONGEST_IDLE and not is_closed(connection):
                    return connection
                connection.close()
        return None

    def give(self, keeper: KeeperAddress, connection: socket.socket) -> None:
        owner = os.getpid(), keeper
        with self.lock:
            idle = self.by_owner.setdefault(owner, [])
            idle.append((connection, time.monotonic()))


IDLE = IdleConnections()


@contextmanager
def keeper_connection(keeper: KeeperAddress) -> Iterator[socket.socket]:
    """A connection for one request. After an error it is closed: what the keeper sends next is not known."""
    connection = IDLE.take(keeper) or connect_to_keeper(keeper)
    try:
        connection.settimeout(PATIENCE)
        yield connection
    except BaseException:
        connection.close()
        raise
    IDLE.give(keeper, connection)


def connect_to_keeper(keeper: KeeperAddress) -> socket.socket:
    if not is_here(keeper):
        return socket.create_connection((keeper.host, keeper.port), PATIENCE)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(f"\0{keeper.name}")
    except BaseException:
        connection.close()
        raise
    return connection


def exchange(
    connection: socket.socket, keeper: KeeperAddress, request: Message, files: tuple[int, ...] = ()
) -> tuple[Message, list[int]]:
    secret = {} if is_here(keeper) else {"secret": keeper.secret}
    send_message(connection, request | secret, files)
    return receive_answer(connection)


def receive_answer(connection: socket.socket) -> tuple[Message, list[int]]:
    answer, files = receive_message(connection)
    if "refused" in answer:
        close_all(files)
        raise UserError(str(answer["refused"]))
    return answer, files


def put_file(keeper: KeeperAddress, name: str, file: int, size: int, checksum: int) -> None:
    request: Message = {"verb": "put", "name": name, "bytes": size, "checksum": checksum}
    with keeper_connection(keeper) as connection:
        if is_here(keeper):
            exchange(connection, keeper, request, (file,))
            return
        exchange(connection, keeper, request)
        send_file_bytes(connection, file, 0, size)
        receive_answer(connection)


def fetch_range(keeper: KeeperAddress, name: str, first: int, last: int) -> bytes:
    request: Message = {"verb": "get", "name": name, "first": first, "last": last}
    with keeper_connection(keeper) as connection:
        answer, files = exchange(connection, keeper, request)
        if not files:
            return bytes(receive_bytes(connection, int(answer["bytes"])))
    try:
        return read_range(files[0], first, min(last, int(answer["bytes"])))
    finally:
        close_all(files)


def read_range(file: int, first: int, last: int) -> bytes:
    pieces: list[bytes] = []
    while first < last:
        piece = os.pread(file, last - first, first)
        if not piece:
            raise LostConnection(f"a kept file ended at byte {first}; expected {last} of them")
        pieces.append(piece)
        first += len(piece)
    return b"".join(pieces)


class KeptFileReader:
    """A file read from its beginning on."""

    def __init__(self, files: KeptFiles, key: str):
        self.files = files
        self.key = key
        self.position = 0

    def __enter__(self) -> KeptFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held open."""

    def read(self, size: int) -> bytes:
        raw = self.files.cat_file(self.key, self.position, self.position + size)
        self.position += len(raw)
        return raw


class KeptFileWriter:
    """A new file, given to its keepers when the block ends without an error. What is written must not change until
    then."""

    def __init__(self, files: KeptFiles, key: str):
        self.files = files
        self.key = key
        self.file = files.take_spare(key)
        self.pieces = PieceWriter(self.file)

    def __enter__(self) -> KeptFileWriter:
        return self

    def write(self, raw: Any) -> None:
        self.pieces.write(raw)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            checksum = self.pieces.finish()
            if kind is None:
                for keeper in self.files.keepers_of_writer():
                    put_file(keeper, self.key, self.file, self.pieces.size, checksum)
        finally:
            os.close(self.file)


@dataclass(frozen=True)
class KeptFiles:
    """The files of all keepers, one keeper of each node, in the order of nodes."""

    keepers: tuple[KeeperAddress, ...]

    def from_here(self) -> list[KeeperAddress]:
        """The keeper of this node, by its name alone, then those of the next nodes around the ring. A launcher has no
        launcher: the keeper of its ranks is its own."""
        launcher = launcher_pid(os.environ) or os.getpid()
        names = [keeper.name for keeper in self.keepers]
        here = names.index(keeper_name(launcher))
        own = KeeperAddress(names[here])
        return [own, *self.keepers[here + 1 :], *self.keepers[:here]]

    def keepers_of_writer(self) -> list[KeeperAddress]:
        return self.from_here()[:COPIES]

    def take_spare(self, key: str) -> int:
        """Memory for a new file: the pages of the one that the keeper of this node dropped last of such a name, else
        none yet."""
        own = self.from_here()[0]
        _, spare = ask_keeper(own, {"verb": "spare", "name": key})
        return spare[0] if spare else os.memfd_create("moefold")

    def list_under(self, key: str) -> dict[str, int]:
        """The sizes of all files in a folder."""
        found: dict[str, int] = {}
        for keeper in self.from_here():
            answer, _ = ask_keeper(keeper, {"verb": "list", "under": f"{key}/"})
            found |= answer["files"]
        return found

    def drop_damaged(self, key: str) -> list[str]:
        """Have every keeper compare what it holds in a folder with what was written; the names of those copies that
        differ, and are dropped."""
        dropped: list[str] = []
        for keeper in self.from_here():
            answer, _ = ask_keeper(keeper, {"verb": "check", "under": f"{key}/"}, PATIENCE_TO_CHECK)
            dropped += answer["damaged"]
        return dropped

    def unstrip_protocol(self, key: str) -> str:
        return f"{PROTOCOL}{key}"

    def invalidate_cache(self) -> None:
        """Nothing is remembered here."""

    def makedirs(self, key: str, exist_ok: bool) -> None:
        """A folder is the names that begin with its own."""

    def isdir(self, key: str) -> bool:
        return bool(self.list_under(key))

    def isfile(self, key: str) -> bool:
        return key in self.list_under(parent_of(key))

    def exists(self, key: str) -> bool:
        return self.isfile(key) or self.isdir(key)

    def info(self, key: str) -> dict[str, Any]:
        return {"size": self.size(key)}

    def size(self, key: str) -> int:
        return self.list_under(parent_of(key))[key]

    def ls(self, key: str, detail: bool) -> list[str]:
        below = len(PurePosixPath(key).parts)
        children = {PurePosixPath(*PurePosixPath(name).parts[: below + 1]) for name in self.list_under(key)}
        return sorted(map(str, children))

    def open(self, key: str, mode: str) -> KeptFileReader | KeptFileWriter:
        return KeptFileWriter(self, key) if mode == "wb" else KeptFileReader(self, key)

    def open_here(self, key: str) -> BinaryIO | None:
        """The file itself, if the keeper of this node has it: reading asks the keeper no more."""
        try:
            _, (file,) = ask_keeper(self.from_here()[0], {"verb": "get", "name": key})
        except UserError:
            return None
        return os.fdopen(file, "rb")

    def cat_file(self, key: str, start: int = 0, end: int = WHOLE) -> bytes:
        for keeper in self.from_here():
            try:
                return fetch_range(keeper, key, start, end)
            except UserError:
                continue  # this one does not have it
        raise FileNotFoundError(f"no keeper has {key}")

    def rm(self, key: str, recursive: bool) -> None:
        for keeper in self.from_here():
            ask_keeper(keeper, {"verb": "remove", "under": f"{key}/"})


def parent_of(key: str) -> str:
    return str(PurePosixPath(key).parent)
