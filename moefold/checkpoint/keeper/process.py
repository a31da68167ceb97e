"""The keeper: a process, one of a node, that holds checkpoints in memory while ranks come and go. Torch-free.

    python -m moefold.checkpoint.keeper.process NAME LAUNCHER LIMIT SERVES

A keeper is a child of no rank. It ends when the launcher ends, however that ends. Its files are anonymous memory
(memfd) without a name anywhere: whatever is killed, the system frees them with their last holder. Ranks of the node
reach it by a Unix socket in the abstract namespace, over which they hand it files without a copy. With SERVES = 1 it
also listens on a port, on which ranks of other nodes send and fetch bytes, if they know its secret.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from moefold.checkpoint.keeper.checksums import file_checksum
from moefold.checkpoint.keeper.messages import (
    Message,
    close_all,
    fill_buffer,
    receive_message,
    send_file_bytes,
    send_message,
    user_of_peer,
)

PATIENCE = 60.0  # seconds that a connection may be silent
MOST_WAITING = 1024  # connections not yet accepted
FIRST_OWN_HANDLE = 3


class RefusedRequest(Exception):
    """A request that a keeper does not fulfil, and why."""


class KeptFile(NamedTuple):
    """An open file, and the checksum of its bytes as they were when it was written. `is_read`: somebody may still read
    it, so that nobody may write to its pages."""

    handle: int
    checksum: int
    is_read: bool = False


class Keeper:
    """Files in memory, by name, in total at most `limit` bytes. The pages of a dropped file are lent to who writes the
    next one of its name, in another folder: to make pages takes longer than to fill them."""

    def __init__(self, limit: int):
        self.limit = limit
        self.files: dict[str, KeptFile] = {}
        self.spare: dict[str, int] = {}  # handles of dropped files, by the last part of their names
        self.lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        handles = [file.handle for file in self.files.values()]
        handles += self.spare.values()
        return sum(map(file_size, handles))

    def require_room(self, size: int) -> None:
        while self.spare and self.held_bytes + size > self.limit:
            self.close_largest_spare()
        if self.held_bytes + size > self.limit:
            raise RefusedRequest(
                f"a file of {size} bytes does not fit beside the {self.held_bytes} that the keeper holds; expected "
                f"{self.limit} in total at most; raise checkpoint.memory_gib"
            )

    def check_room(self, size: int) -> None:
        """As `require_room`, for those who do not hold the lock: files come and go meanwhile."""
        with self.lock:
            self.require_room(size)

    def put(self, name: str, file: int, checksum: int) -> None:
        """Hold a file, from now on the keeper's own."""
        with self.lock:
            self.drop(name)
            self.require_room(file_size(file))
            self.files[name] = KeptFile(file, checksum)

    def borrow(self, name: str) -> int:
        """A handle of a file, which the caller closes."""
        with self.lock:
            file = self.files.get(name)
            if file is None:
                raise RefusedRequest(f"no file {name}")
            self.files[name] = file._replace(is_read=True)
            return os.dup(file.handle)

    def list_files(self, under: str) -> dict[str, int]:
        """The sizes of the files whose names begin so."""
        with self.lock:
            found = [(name, file) for name, file in self.files.items() if name.startswith(under)]
            return {name: file_size(file.handle) for name, file in found}

    def drop_damaged(self, under: str) -> list[str]:
        """Drop the files whose bytes have changed since they were written; their names."""
        damaged: list[str] = []
        for name in self.list_files(under):
            handle = self.borrow(name)
            try:
                now = file_checksum(handle)
            finally:
                os.close(handle)
            with self.lock:
                if name in self.files and self.files[name].checksum != now:
                    self.drop(name)  # its pages, which may be at fault, go to nobody: it was read
                    damaged.append(name)
        return damaged

    def remove(self, under: str) -> None:
        with self.lock:
            for name in list(self.files):
                if name.startswith(under):
                    self.drop(name)
            if not under:
                close_all(self.spare.values())
                self.spare.clear()

    def drop(self, name: str) -> None:
        file = self.files.pop(name, None)
        if file is None:
            return
        if file.is_read:
            os.close(file.handle)
            return
        last_part = name.rpartition("/")[2]
        before = self.spare.pop(last_part, None)
        self.spare[last_part] = file.handle
        if before is not None:
            os.close(before)

    def take_spare(self, name: str) -> list[int]:
        """The pages of a dropped file of that last part of a name, if there is one, from now on the caller's own."""
        last_part = name.rpartition("/")[2]
        with self.lock:
            handle = self.spare.pop(last_part, None)
        return [] if handle is None else [handle]

    def close_largest_spare(self) -> None:
        largest = max(self.spare, key=self.spare_bytes)
        os.close(self.spare.pop(largest))

    def spare_bytes(self, last_part: str) -> int:
        return file_size(self.spare[last_part])


class KeeperServer:
    """Answers requests to a keeper, each on a connection and a thread of its own."""

    def __init__(self, keeper: Keeper, local: socket.socket, far: socket.socket | None):
        self.keeper = keeper
        self.local = local
        self.far = far
        self.secret = secrets.token_hex(16)

    def serve_until_end(self, launcher: int) -> None:
        """Serve until the process `launcher`, given by an open handle, has ended."""
        accepts: dict[int, Callable[[], None]] = {self.local.fileno(): self.accept_local}
        if self.far is not None:
            accepts[self.far.fileno()] = self.accept_far
        watched = [launcher, *accepts]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if launcher in ready:
                return
            for number in ready:
                accepts[number]()

    def accept_local(self) -> None:
        connection, _ = self.local.accept()
        if user_of_peer(connection) == os.getuid():
            self.answer_in_thread(self.answer_local, connection)
        else:
            connection.close()

    def accept_far(self) -> None:
        assert self.far is not None
        connection, _ = self.far.accept()
        self.answer_in_thread(self.answer_far, connection)

    def answer_in_thread(self, answer: Callable[[socket.socket], None], connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        threading.Thread(target=self.answer_all, args=(answer, connection), daemon=True).start()

    def answer_all(self, answer: Callable[[socket.socket], None], connection: socket.socket) -> None:
        """Answer one request after another, until one is refused or the asking side is gone, silent, or none of ours:
        it sees the end of the connection."""
        with connection:
            try:
                while True:
                    answer(connection)
            except RefusedRequest as refused:
                send_message(connection, {"refused": str(refused)})
            except (OSError, KeyError, ValueError, TypeError):
                pass

    def answer_local(self, connection: socket.socket) -> None:
        request, files = receive_message(connection)
        verb = request["verb"]
        if verb == "put" and files:
            self.put_local(request, files[0])
            send_message(connection, {})
            return
        close_all(files)
        if verb == "get":
            file = self.keeper.borrow(request["name"])
            send_and_close(connection, {"bytes": file_size(file)}, [file])
        elif verb == "spare":
            spare = self.keeper.take_spare(request["name"])
            send_and_close(connection, {}, spare)
        elif verb == "hello":
            port = self.far.getsockname()[1] if self.far is not None else 0
            send_message(connection, {"port": port, "secret": self.secret})
        else:
            send_message(connection, self.answer_plain(request))

    def put_local(self, request: Message, file: int) -> None:
        try:
            self.keeper.put(request["name"], file, request["checksum"])
        except BaseException:
            os.close(file)
            raise

    def answer_far(self, connection: socket.socket) -> None:
        request, files = receive_message(connection)
        close_all(files)
        known = hmac.compare_digest(str(request.get("secret")), self.secret)
        if not known:
            raise RefusedRequest("the secret is not this keeper's")
        verb = request["verb"]
        if verb == "put":
            self.put_far(request, connection)
        elif verb == "get":
            self.send_range(request, connection)
        else:
            send_message(connection, self.answer_plain(request))

    def put_far(self, request: Message, connection: socket.socket) -> None:
        """Take a file from another node: room is made sure of before its bytes are sent."""
        size = int(request["bytes"])
        spare = self.keeper.take_spare(request["name"])
        file = spare[0] if spare else os.memfd_create("moefold")
        try:
            self.keeper.check_room(size)
            send_message(connection, {})
            receive_file(connection, file, size)
            self.keeper.put(request["name"], file, request["checksum"])
        except BaseException:
            os.close(file)
            raise
        send_message(connection, {})

    def send_range(self, request: Message, connection: socket.socket) -> None:
        file = self.keeper.borrow(request["name"])
        try:
            first, last = int(request["first"]), min(int(request["last"]), file_size(file))
            send_message(connection, {"bytes": last - first})
            send_file_bytes(connection, file, first, last)
        finally:
            os.close(file)

    def answer_plain(self, request: Message) -> Message:
        under = str(request["under"])
        if request["verb"] == "remove":
            self.keeper.remove(under)
            return {}
        if request["verb"] == "list":
            return {"files": self.keeper.list_files(under)}
        if request["verb"] == "check":
            return {"damaged": self.keeper.drop_damaged(under)}
        raise RefusedRequest(f"no verb {request['verb']}")


def send_and_close(connection: socket.socket, message: Message, files: list[int]) -> None:
    try:
        send_message(connection, message, files)
    finally:
        close_all(files)


def file_size(file: int) -> int:
    return os.fstat(file).st_size


def receive_file(connection: socket.socket, file: int, size: int) -> None:
    os.ftruncate(file, size)
    if size:
        with mmap.mmap(file, size) as memory, memoryview(memory) as view:
            fill_buffer(connection, view)


def main(argv: list[str]) -> None:
    """Listen, then go on as a child of nobody: whoever waits for this process knows that the keeper answers."""
    name, launcher, limit, serves = argv
    os.closerange(FIRST_OWN_HANDLE, os.sysconf("SC_OPEN_MAX"))  # sockets of the rank would seem to live on with it
    watched = os.pidfd_open(int(launcher))
    local = socket.socket(socket.AF_UNIX)
    local.bind(f"\0{name}")
    local.listen(MOST_WAITING)
    far: Any = socket.create_server(("", 0), backlog=MOST_WAITING) if serves == "1" else None
    server = KeeperServer(Keeper(int(limit)), local, far)
    if os.fork():
        os._exit(0)
    server.serve_until_end(watched)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
