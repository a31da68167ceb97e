"""Reading of files that a user hands over, within bounds: no file fills the memory."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from moefold.config.errors import UserError

LARGEST_JSON = 256 << 20  # bytes; the index of a model with a million tensors has half of that


class ReadablePath(Protocol):
    """A file of this machine, or of remote storage."""

    def open(self, mode: Literal["rb"], /) -> Any: ...


def read_bounded_file(path: ReadablePath, most: int = LARGEST_JSON) -> bytes:
    """The bytes of a file, of which no more than `most` are read."""
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise UserError(f"{path} has more than {most >> 20} MiB; expected a smaller file of its kind")
    return raw
