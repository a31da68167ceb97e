"""Where checkpoints lie: a folder of this machine, or anything fsspec reaches (s3://, gs://, ...). Torch-free.

A place is a `pathlib.Path`, or a `RemotePath` with the few methods of one that are used here. What the two do otherwise
stands in this file: a folder is written aside and renamed, which commits it; an object store cannot rename, so there
the manifest, which is written last, commits.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO

from moefold.config.refused import Refused, printable


@dataclass(frozen=True)
class RemotePath:
    files: Any  # an fsspec file system
    path: PurePosixPath

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.files, self.path / name)

    def __str__(self) -> str:
        return self.files.unstrip_protocol(str(self.path))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.files, self.path.parent)

    def with_suffix(self, suffix: str) -> RemotePath:
        return RemotePath(self.files, self.path.with_suffix(suffix))

    def resolve(self) -> RemotePath:
        return self

    def is_symlink(self) -> bool:
        return self.files.isfile(str(self.path)) and bool(self.files.info(str(self.path)).get("islink", False))

    def exists(self) -> bool:
        return self.files.exists(str(self.path))

    def is_file(self) -> bool:
        return self.files.isfile(str(self.path))

    def is_dir(self) -> bool:
        return self.files.isdir(str(self.path))

    def iterdir(self) -> Iterator[RemotePath]:
        self.files.invalidate_cache()  # other ranks write here too
        return (RemotePath(self.files, PurePosixPath(found)) for found in self.files.ls(str(self.path), detail=False))

    def stat(self) -> SimpleNamespace:
        self.files.invalidate_cache()
        return SimpleNamespace(st_size=self.files.size(str(self.path)))

    def open(self, mode: str) -> Any:
        return self.files.open(str(self.path), mode)

    def read_bytes(self) -> bytes:
        return self.files.cat_file(str(self.path))


Place = Path | RemotePath


def place_of(text: str) -> Place:
    """The place that a person named."""
    if "://" not in text:
        return Path(text)
    try:
        import fsspec
    except ImportError:
        raise Refused(f"{printable(text)} needs fsspec; install it with pip install 'moefold[remote]'") from None
    try:
        files, path = fsspec.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise Refused(f"{printable(text)} cannot be reached: {printable(str(error))}; expected a folder or "
                      "a path that fsspec knows, such as s3://bucket/run with s3fs installed") from None  # fmt: skip
    return RemotePath(files, PurePosixPath(path))


def free_bytes(place: Place) -> int | None:
    """How much fits there, now or once the folder is made; None if nobody can tell."""
    if not isinstance(place, Path):
        return None
    return shutil.disk_usage(next(p for p in (place, *place.absolute().parents) if p.exists())).free


def workplace(final: Place) -> Place:
    """Where a checkpoint is written before it is committed."""
    return final.with_suffix(".tmp") if isinstance(final, Path) else final


def make_folder(place: Place) -> None:
    """An empty folder. There may be none on an object store until something lies in it."""
    place.mkdir() if isinstance(place, Path) else place.files.makedirs(str(place.path), exist_ok=True)


def remove_tree(place: Place) -> None:
    shutil.rmtree(place) if isinstance(place, Path) else place.files.rm(str(place.path), recursive=True)


def move_tree(place: Place, to: Place) -> None:
    if isinstance(place, Path):
        os.rename(place, to)  # pyright: ignore[reportArgumentType]
    else:
        place.files.mv(str(place.path), str(to.path), recursive=True)  # pyright: ignore[reportAttributeAccessIssue]


def write_file(place: Place, parts: Iterable[Any]) -> None:
    """Bytes-like parts, one behind the other; on a disk of this machine when this returns."""
    with place.open("wb") as file:
        for part in parts:
            file.write(part)
        if isinstance(place, Path):
            file.flush()
            os.fsync(file.fileno())


def sync_folder(place: Place) -> None:
    """Make sure a folder's list of names is on the disk."""
    if isinstance(place, Path):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_window(place: Place) -> Window:
    return Mapped(place.open("rb")) if isinstance(place, Path) else Fetched(place)


class Mapped:
    """A file of this machine: bytes are read when they are looked at."""

    def __init__(self, file: BinaryIO):
        with file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __call__(self, first: int, last: int) -> memoryview | bytes:
        return memoryview(self.bytes)[first:last]


class Fetched:
    """A file elsewhere: bytes are fetched range by range."""

    def __init__(self, place: RemotePath):
        self.place = place

    def __call__(self, first: int, last: int) -> memoryview | bytes:
        return self.place.files.cat_file(str(self.place.path), start=first, end=last)


Window = Mapped | Fetched
