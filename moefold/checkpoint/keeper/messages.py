"""Messages between ranks and keepers: a length, then JSON. Over a Unix socket a message may carry an open file. Nothing
is unpickled. Torch-free."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, cast

LENGTH = struct.Struct(">I")
LONGEST_MESSAGE = 16 << 20  # bytes; a list of files has some hundred for each
CREDENTIALS = struct.Struct("3i")  # process, user, group

Message = dict[str, Any]


class LostConnection(OSError):
    """The other side has gone, or sends what is no message."""


def send_message(connection: socket.socket, content: Message, files: Sequence[int] = ()) -> None:
    raw = json.dumps(content).encode()
    length = LENGTH.pack(len(raw))
    if files:
        socket.send_fds(connection, [length], files)
        connection.sendall(raw)
    else:
        connection.sendall(length + raw)


def receive_message(connection: socket.socket) -> tuple[Message, list[int]]:
    """A message and the open files that came with it, which the caller closes."""
    first, files, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    try:
        return receive_content(connection, first), files
    except BaseException:
        close_all(files)
        raise


def receive_content(connection: socket.socket, first: bytes) -> Message:
    rest = receive_bytes(connection, LENGTH.size - len(first))
    (length,) = LENGTH.unpack(first + rest)
    if length > LONGEST_MESSAGE:
        raise LostConnection(f"a message of {length} bytes; expected {LONGEST_MESSAGE} at most")
    raw = receive_bytes(connection, length)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise LostConnection("a message that is no JSON object")
    return cast(Message, content)


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    raw = bytearray(size)
    fill_buffer(connection, memoryview(raw))
    return raw


def fill_buffer(connection: socket.socket, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        count = connection.recv_into(buffer[filled:])
        if count == 0:
            raise LostConnection(f"the connection ended after {filled} of {len(buffer)} bytes")
        filled += count


def send_file_bytes(connection: socket.socket, file: int, first: int, last: int) -> None:
    if first == last:
        return
    with open(file, "rb", buffering=0, closefd=False) as source:
        sent = connection.sendfile(source, first, last - first)
    if sent < last - first:
        raise LostConnection(f"a file ended after {sent} bytes; expected {last - first} of them")


def close_all(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def user_of_peer(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(raw)
    return user
