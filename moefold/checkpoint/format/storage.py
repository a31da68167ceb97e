"""Storage of checkpoints: a local folder, or anything fsspec reaches (s3://, gs://, ...). Torch-free.

A storage path is a `pathlib.Path`, or a `RemotePath` with those of its methods that are used here. All differences
between the two are in this file. A local folder is staged under another name, and the rename commits it. An object
store cannot rename: there the manifest, which is written last, commits.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO

from moefold.config.errors import UserError, printable_text
from moefold.config.run import Config

DISK_BLOCK = 4096  # bytes: direct I/O needs this alignment, in memory and in the file
WRITE_BYTES = 16 << 20  # bytes of one write
METADATA_BYTES = 1 << 20  # bytes beyond the tensors: ledger, manifest, file headers
MIB = 1 << 20


@dataclass(frozen=True)
class RemotePath:
    """A path of an fsspec file system."""

    files: Any  # the file system
    path: PurePosixPath

    @property
    def key(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.files, self.path / name)

    def __str__(self) -> str:
        return self.files.unstrip_protocol(self.key)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.files, self.path.parent)

    def with_suffix(self, suffix: str) -> RemotePath:
        path = self.path.with_suffix(suffix)
        return RemotePath(self.files, path)

    def resolve(self) -> RemotePath:
        return self

    def is_symlink(self) -> bool:
        if not self.is_file():
            return False
        info = self.files.info(self.key)
        return bool(info.get("islink", False))

    def exists(self) -> bool:
        return self.files.exists(self.key)

    def is_file(self) -> bool:
        return self.files.isfile(self.key)

    def is_dir(self) -> bool:
        return self.files.isdir(self.key)

    def iterdir(self) -> Iterator[RemotePath]:
        self.files.invalidate_cache()  # other ranks write here too
        keys = self.files.ls(self.key, detail=False)
        for key in keys:
            yield RemotePath(self.files, PurePosixPath(key))

    def stat(self) -> SimpleNamespace:
        self.files.invalidate_cache()
        return SimpleNamespace(st_size=self.files.size(self.key))

    def open(self, mode: str) -> Any:
        return self.files.open(self.key, mode)

    def read_bytes(self) -> bytes:
        return self.files.cat_file(self.key)


StoragePath = Path | RemotePath


def parse_storage_path(text: str) -> StoragePath:
    """The path that a user wrote: a local one, or a URL of fsspec."""
    if "://" not in text:
        return Path(text)
    shown = printable_text(text)
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{shown} needs fsspec; install it with pip install 'moefold[remote]'") from None
    try:
        files, path = fsspec.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{shown} cannot be reached: {printable_text(str(error))}; expected a folder or "
            "a path that fsspec knows, such as s3://bucket/run with s3fs installed"
        ) from None
    return RemotePath(files, PurePosixPath(path))


def checkpoint_folder(config: Config, out: Path) -> StoragePath:
    """The folder of the checkpoints of the run in `out`."""
    path = config.checkpoint.path
    if path:
        return parse_storage_path(path)
    return out / "checkpoints"


def free_disk_bytes(path: StoragePath) -> int | None:
    """Free bytes of the disk that has this path, or will have it; None on remote storage, which does not say."""
    if not isinstance(path, Path):
        return None
    candidates = (path, *path.absolute().parents)
    existing = next(folder for folder in candidates if folder.exists())
    return shutil.disk_usage(existing).free


def require_free_space(path: StoragePath, needed: int) -> None:
    """Refuse a write that cannot fit, before it begins."""
    free = free_disk_bytes(path)
    if free is not None and free < needed:
        raise UserError(
            f"no space on {path}: a checkpoint needs {needed / MIB:.1f} MiB, there are {free / MIB:.1f}; "
            "free some, or choose another place with --out; checkpoints written before are untouched"
        )


def staging_folder(final: StoragePath) -> StoragePath:
    """The folder in which a checkpoint is written before it is committed."""
    if isinstance(final, Path):
        return final.with_suffix(".tmp")
    return final


def create_folder(path: StoragePath) -> None:
    """Make an empty folder. An object store may show none until there is a file in it."""
    if isinstance(path, Path):
        path.mkdir()
    else:
        path.files.makedirs(path.key, exist_ok=True)


def remove_tree(path: StoragePath) -> None:
    if isinstance(path, Path):
        shutil.rmtree(path)
    else:
        path.files.rm(path.key, recursive=True)


def rename_tree(source: StoragePath, target: StoragePath) -> None:
    if isinstance(source, RemotePath):
        assert isinstance(target, RemotePath)
        source.files.mv(source.key, target.key, recursive=True)
    else:
        assert isinstance(target, Path)
        os.rename(source, target)


def write_synced_file(path: StoragePath, raw: bytes | memoryview) -> None:
    """Write a file. A local one is on the disk when this returns."""
    write_synced_pieces(path, [memoryview(raw)])


def write_synced_pieces(path: StoragePath, pieces: Iterable[memoryview]) -> None:
    """Write a file from pieces, all but the last of whole disk blocks, and each before the next is asked for. A local
    file is on the disk when this returns."""
    if isinstance(path, Path):
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                write_direct_io(file.fileno(), piece)
            os.fsync(file.fileno())
        return
    with path.open("wb") as file:
        for piece in pieces:
            for begin in range(0, len(piece), WRITE_BYTES):
                file.write(piece[begin : begin + WRITE_BYTES])


def write_direct_io(handle: int, raw: memoryview) -> None:
    """Write past the page cache, in whole blocks: no core is busy copying, so all are free to hash. Falls back to the
    page cache for the last, partial block, for unaligned memory, and where the file system has no direct I/O."""
    written = 0
    direct = set_direct_io(handle, True)
    while written < len(raw):
        size = len(raw) - written
        if direct and size < DISK_BLOCK:
            # The rest is no whole block.
            direct = set_direct_io(handle, False)
        if direct:
            size -= size % DISK_BLOCK
        end = written + min(size, WRITE_BYTES)
        try:
            written += os.write(handle, raw[written:end])
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            # The memory is not aligned, or the file system refuses direct writes after all.
            direct = set_direct_io(handle, False)


def set_direct_io(handle: int, enabled: bool) -> bool:
    """Switch direct I/O of an open file; returns whether it is on now."""
    direct = getattr(os, "O_DIRECT", 0)  # some systems have none
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    flags = flags | direct if enabled else flags & ~direct
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)
    except OSError:  # the file system has none
        return False
    return enabled and bool(direct)


def fsync_folder(path: StoragePath) -> None:
    """Sync a folder's list of names to the disk."""
    if not isinstance(path, Path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_byte_source(path: StoragePath) -> ByteSource:
    if isinstance(path, Path):
        return MappedFile(path.open("rb"))
    open_here = getattr(path.files, "open_here", None)  # of storage that may have a file in memory of this machine
    file = open_here(path.key) if open_here else None
    return RemoteFile(path) if file is None else MappedFile(file)


class MappedFile:
    """A file of this machine, memory-mapped: the system reads bytes on first access."""

    def __init__(self, file: BinaryIO):
        with file:
            number = file.fileno()
            self.bytes = mmap.mmap(number, 0, access=mmap.ACCESS_READ)

    def __call__(self, first: int, last: int) -> memoryview | bytes:
        return memoryview(self.bytes)[first:last]


class RemoteFile:
    """A remote file: every range of bytes is one request."""

    def __init__(self, path: RemotePath):
        self.path = path

    def __call__(self, first: int, last: int) -> memoryview | bytes:
        path = self.path
        return path.files.cat_file(path.key, start=first, end=last)


ByteSource = MappedFile | RemoteFile
