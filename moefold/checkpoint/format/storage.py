"""Where checkpoints lie: a folder of this machine, or anything fsspec reaches (s3://, gs://, ...). Torch-free.

A place is a `pathlib.Path`, or a `RemotePath` with the few methods of one that are used here. What the two do otherwise
stands in this file: a folder is written aside and renamed, which commits it; an object store cannot rename, so there
the manifest, which is written last, commits.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO

from moefold.config.errors import UserError, printable_text

DISK_BLOCK = 4096  # bytes: what begins at a multiple of this, in memory and in a file, a disk can fetch by itself
WRITE_BYTES = 16 << 20  # bytes of one write


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


StoragePath = Path | RemotePath


def parse_storage_path(text: str) -> StoragePath:
    """The place that a person named."""
    if "://" not in text:
        return Path(text)
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{printable_text(text)} needs fsspec; install it with pip install 'moefold[remote]'") from None
    try:
        files, path = fsspec.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise UserError(f"{printable_text(text)} cannot be reached: {printable_text(str(error))}; expected a folder or "
                      "a path that fsspec knows, such as s3://bucket/run with s3fs installed") from None  # fmt: skip
    return RemotePath(files, PurePosixPath(path))


def free_disk_bytes(place: StoragePath) -> int | None:
    """How much fits there, now or once the folder is made; None if nobody can tell."""
    if not isinstance(place, Path):
        return None
    return shutil.disk_usage(next(p for p in (place, *place.absolute().parents) if p.exists())).free


def staging_folder(final: StoragePath) -> StoragePath:
    """Where a checkpoint is written before it is committed."""
    return final.with_suffix(".tmp") if isinstance(final, Path) else final


def create_folder(place: StoragePath) -> None:
    """An empty folder. There may be none on an object store until something lies in it."""
    place.mkdir() if isinstance(place, Path) else place.files.makedirs(str(place.path), exist_ok=True)


def remove_tree(place: StoragePath) -> None:
    shutil.rmtree(place) if isinstance(place, Path) else place.files.rm(str(place.path), recursive=True)


def rename_tree(place: StoragePath, to: StoragePath) -> None:
    if isinstance(place, Path):
        os.rename(place, to)  # pyright: ignore[reportArgumentType]
    else:
        place.files.mv(str(place.path), str(to.path), recursive=True)  # pyright: ignore[reportAttributeAccessIssue]


def write_synced_file(place: StoragePath, raw: bytes | memoryview) -> None:
    """Write a whole file; it is on the disk when this returns, if that is one of this machine."""
    if isinstance(place, Path):
        with place.open("wb", buffering=0) as file:
            write_direct_io(file.fileno(), memoryview(raw))
            os.fsync(file.fileno())
    else:
        with place.open("wb") as file:
            for at in range(0, len(raw), WRITE_BYTES):
                file.write(raw[at : at + WRITE_BYTES])


def write_direct_io(handle: int, raw: memoryview) -> None:
    """Whole blocks go from their place in memory to the disk: no core copies them into the system's cache, so all are
    free to hash. Where blocks do not lie as they should, or a file system cannot, through the cache as usual."""
    at, direct = 0, set_direct_io(handle, True)
    while at < len(raw):
        left = len(raw) - at
        if direct and left < DISK_BLOCK:
            direct = set_direct_io(handle, False)
        size = min(left - left % DISK_BLOCK if direct else left, WRITE_BYTES)
        try:
            at += os.write(handle, raw[at : at + size])
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = set_direct_io(handle, False)


def set_direct_io(handle: int, on: bool) -> bool:
    """Whether writes to this file go past the cache from now on."""
    direct = getattr(os, "O_DIRECT", 0)  # not every system has it
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError:  # the file system cannot
        return False
    return on and bool(direct)


def fsync_folder(place: StoragePath) -> None:
    """Make sure a folder's list of names is on the disk."""
    if isinstance(place, Path):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_byte_source(place: StoragePath) -> ByteSource:
    return MappedFile(place.open("rb")) if isinstance(place, Path) else RemoteFile(place)


class MappedFile:
    """A file of this machine: bytes are read when they are looked at."""

    def __init__(self, file: BinaryIO):
        with file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __call__(self, first: int, last: int) -> memoryview | bytes:
        return memoryview(self.bytes)[first:last]


class RemoteFile:
    """A file elsewhere: bytes are fetched range by range."""

    def __init__(self, place: RemotePath):
        self.place = place

    def __call__(self, first: int, last: int) -> memoryview | bytes:
        return self.place.files.cat_file(str(self.place.path), start=first, end=last)


ByteSource = MappedFile | RemoteFile
