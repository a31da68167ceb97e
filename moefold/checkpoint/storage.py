"""Tensors on disk for torch's distributed checkpoint, without pickle: safetensors for data, JSON for the table.

    rank-00000.safetensors   this rank's chunks, each under "name@offset,offset"
    tensors.json             every logical tensor: dtype, shape, and which chunk lies in which file

torch DCP plans who writes and who reads which slice of which logical tensor; this file only stores and fetches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from moefold.config.refused import Refused

TABLE = "tensors.json"


Box = tuple[tuple[int, ...], torch.Tensor]  # where it begins in the whole, and its values


class Part(torch.Tensor):
    """What a rank holds of a logical tensor, as torch DCP asks for it: a tensor of the whole shape that has nothing but
    some boxes of it."""

    boxes: list[Box]

    @staticmethod
    def __new__(cls, shape: Sequence[int], boxes: list[Box], like: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)
        made.boxes = boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> Any:
        raise TypeError(f"a part of a tensor is a description; {operation} needs the tensor itself")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        items = [TensorWriteData(chunk, properties, torch.Size(self.shape)) for chunk in self.__create_chunk_list__()]
        return [WriteItem(MetadataIndex(name, d.chunk.offsets), WriteItemType.SHARD, tensor_data=d) for d in items]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(starts), values.shape) for starts, values in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(values for starts, values in self.boxes if starts == tuple(index.offset or ()))


def boxes_of(values: torch.Tensor, first: int, shape: Sequence[int]) -> list[Box]:
    """The values of a flattened tensor of that shape from element `first` on, as few boxes as possible.

    shape 4 x 5, elements 3..17:     . . . a a        a, b and c are boxes: the end of a row, whole rows,
                                     b b b b b        the beginning of a row
                                     b b b b b
                                     c c . . .
    """
    if not len(values):
        return []
    if len(shape) <= 1:
        return [((first,) if shape else (), values.view([len(values)] if shape else []))]
    inner = prod(shape[1:])
    boxes: list[Box] = []
    at, last = first, first + len(values)
    while at < last:
        row, inside = divmod(at, inner)
        if inside == 0 and last - at >= inner:
            rows = (last - at) // inner
            whole = values[at - first : at - first + rows * inner].view(rows, *shape[1:])
            boxes.append(((row, *(0 for _ in shape[1:])), whole))
            at += rows * inner
        else:
            end = min(last, (row + 1) * inner)
            for starts, part in boxes_of(values[at - first : end - first], inside, shape[1:]):
                boxes.append(((row, *starts), part[None]))
            at = end
    return boxes


@dataclass(frozen=True)
class Stored:
    """Where a chunk went, and the digest of the file that holds it."""

    file: str
    chunk: str
    sha256: str


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunk_name(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(str(o) for o in index.offset or ())}"


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class SafeWriter(StorageWriter):
    """Each rank writes one safetensors file; the coordinator ends up with the table of all of them."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.file = folder, f"rank-{rank:05d}.safetensors"
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {chunk_name(i.index): planner.resolve_data(i).detach().cpu().contiguous() for i in plan.items}  # pyright: ignore[reportAttributeAccessIssue]
        if not tensors:
            return done([])
        path = self.folder / self.file
        save_file(tensors, path)
        sha256 = digest_of(path)
        stored = [Stored(self.file, name, sha256) for name in tensors]
        sizes = [t.nbytes for t in tensors.values()]
        items = zip(plan.items, sizes, stored, strict=True)
        return done([WriteResult(item.index, size, where) for item, size, where in items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where: dict[MetadataIndex, Stored] = {r.index: r.storage_data for rank in results for r in rank}
        table = {name: describe(name, entry, where) for name, entry in metadata.state_dict_metadata.items()}
        (self.folder / TABLE).write_text(json.dumps(table, indent=1))
        self.digests = {s.file: s.sha256 for s in where.values()} | {TABLE: digest_of(self.folder / TABLE)}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def describe(name: str, entry: Any, where: dict[MetadataIndex, Stored]) -> dict[str, Any]:
    """One logical tensor as JSON."""
    if not isinstance(entry, TensorStorageMetadata):
        raise TypeError(f"{name} is not a tensor; everything else belongs into state.json")
    chunks = []
    for chunk in entry.chunks:
        stored = where[MetadataIndex(name, chunk.offsets)]
        place = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
        chunks.append({**place, "file": stored.file, "chunk": stored.chunk})
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}


def read_table(folder: Path) -> dict[str, Any]:
    return json.loads((folder / TABLE).read_text())


class SafeReader(StorageReader):
    """Fetches slices of chunks; a rank reads no more of a file than it needs."""

    def __init__(self, folder: Path):
        self.folder, self.table = folder, read_table(folder)
        self.places = {
            MetadataIndex(name, chunk["offsets"]): (chunk["file"], chunk["chunk"])
            for name, entry in self.table.items()
            for chunk in entry["chunks"]
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: metadata_of(entry) for name, entry in self.table.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.places[item.storage_index][0], []).append(item)
        for file, items in by_file.items():
            try:
                with safe_open(self.folder / file, framework="pt") as opened:
                    for item in items:
                        part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                        chunk = self.places[item.storage_index][1]
                        stored = opened.get_slice(chunk)[part] if part else opened.get_tensor(chunk)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(stored)
                        planner.commit_tensor(item, target)
            except SafetensorError as error:
                raise Refused(f"{self.folder / file} cannot be read: {error}") from None
        return done(None)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def metadata_of(entry: dict[str, Any]) -> TensorStorageMetadata:
    def size(numbers: Sequence[int]) -> torch.Size:
        return torch.Size(numbers)

    chunks = [ChunkStorageMetadata(size(c["offsets"]), size(c["sizes"])) for c in entry["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, entry["dtype"])), size(entry["shape"]), chunks)
