"""Reading of files that a user hands over, within bounds: no file fills the memory."""

from __future__ import annotations

from pathlib import Path

from moefold.config.errors import UserError

LARGEST_JSON = 256 << 20  # bytes; the index of a model with a million tensors has half of that


def read_bounded_file(path: Path, most: int = LARGEST_JSON) -> bytes:
    """The bytes of a file, of which no more than `most` are read."""
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise UserError(f"{path} has more than {most >> 20} MiB; expected a smaller file of its kind")
    return raw
