"""The routing file: the experts of every token of a run, by MoE layer, in one safetensors file. Torch-free.

    layer.3            I16 [sequences, tokens, choices]    expert ids; -1 is no expert
    layer.3.recorded   U8  [sequences]                      1 where the row above was written

Rows are sequences by their number in the run's order, so that a file fits any layout and any batch size. Each rank
writes rows of its own at their place in the file, and reads no others. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moefold.checkpoint.format.safetensors_header import (
    DTYPE_BYTES,
    LENGTH_BYTES,
    HeaderEntry,
    StoredTensor,
    encode_safetensors_header,
    read_raw_header,
    tensors_in_file,
)
from moefold.config.errors import UserError

IDS, FLAGS = "I16", "U8"
MOST_EXPERTS = 1 << 15  # ids from 0 to 32,767


class RoutingShape(NamedTuple):
    """Sequences of a run, tokens of a sequence, choices of a token."""

    sequences: int
    tokens: int
    choices: int


def ids_name(layer: int) -> str:
    return f"layer.{layer}"


def flags_name(layer: int) -> str:
    return f"layer.{layer}.recorded"


def create_routing_file(path: Path, layers: Iterable[int], shape: RoutingShape) -> None:
    """An empty file for these layers, as large as it will be; space is taken as rows are written. A file of the same
    layers and sizes is continued, any other is refused."""
    header, size = routing_header(layers, shape)
    if path.exists():
        same_size = path.stat().st_size == size
        if not same_size or read_raw_header(path) != header[LENGTH_BYTES:]:
            raise UserError(
                f"train.record_routing: {path} holds something else than the routing of this run; expected no file, or "
                "one that this run began; choose another path"
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(header)
        file.truncate(size)


def routing_header(layers: Iterable[int], shape: RoutingShape) -> tuple[bytes, int]:
    """The beginning of a file, and the size of the whole."""
    entries: dict[str, object] = {}
    end = 0
    for layer in sorted(layers):
        tensors = (ids_name(layer), IDS, shape), (flags_name(layer), FLAGS, shape[:1])
        for name, dtype, sizes in tensors:
            begin = end
            end += prod(sizes) * DTYPE_BYTES[dtype]
            entry = HeaderEntry(dtype, tuple(sizes), begin, end)
            entries[name] = entry.as_json()
    header = encode_safetensors_header(entries)
    return header, len(header) + end


class RoutingWriter:
    """Writes rows of this rank into a file that `create_routing_file` made."""

    def __init__(self, path: Path):
        self.tensors = tensors_in_file(path)
        self.file = os.open(path, os.O_WRONLY)

    def write_rows(self, layer: int, first: int, ids_BSK: np.ndarray) -> None:
        """The ids of the sequences from number `first` on. They count as recorded when their rows are written."""
        ids = ids_BSK.astype(np.int16)
        ids_tensor = self.tensors[ids_name(layer)]
        self.write_at(ids_tensor, first, ids)
        flags = np.ones(len(ids), np.uint8)
        flags_tensor = self.tensors[flags_name(layer)]
        self.write_at(flags_tensor, first, flags)

    def write_at(self, tensor: StoredTensor, first: int, rows: np.ndarray) -> None:
        row_bytes = rows.nbytes // len(rows)
        offset = tensor.offset + first * row_bytes
        os.pwrite(self.file, rows.tobytes(), offset)

    def close(self) -> None:
        os.close(self.file)


class RoutingReader:
    """Reads rows of some layers of a file, after checking that they fit a run of this shape with so many experts."""

    def __init__(self, path: Path, layers: Iterable[int], shape: RoutingShape, experts: int):
        if not path.is_file():
            raise UserError(f"train.replay_routing: no file {path}; expected one that train.record_routing wrote")
        self.path = path
        self.layers = list(layers)
        self.experts = experts
        tensors = tensors_in_file(path)
        self.ids: dict[int, np.ndarray] = {}
        self.flags: dict[int, np.ndarray] = {}
        problems: list[str] = []
        for layer in self.layers:
            problem = layer_problem(layer, tensors, shape)
            if problem:
                problems.append(f"train.replay_routing: {path}: {problem}")
                continue
            ids = tensors[ids_name(layer)]
            flags = tensors[flags_name(layer)]
            self.ids[layer] = map_rows(ids, np.int16)
            self.flags[layer] = map_rows(flags, np.uint8)
        if problems:
            raise UserError(*problems)

    def read_rows(self, layer: int, first: int, count: int) -> np.ndarray:
        """The ids of `count` sequences from number `first` on: (B, S, K). Ids that no expert has are refused."""
        rows = slice(first, first + count)
        ids_BSK = np.array(self.ids[layer][rows])
        where = f"train.replay_routing: {self.path}: layer {layer}, sequences {first} to {first + count - 1}"
        if not self.flags[layer][rows].all():
            raise UserError(f"{where}: some were not recorded; record as many steps as are replayed")
        lowest = int(ids_BSK.min())
        highest = int(ids_BSK.max())
        if lowest < -1 or highest >= self.experts:
            raise UserError(
                f"{where}: expert ids from {lowest} to {highest}; expected -1 (no expert) to {self.experts - 1}; "
                "replay what a model with as many experts has recorded"
            )
        if names_expert_twice(ids_BSK):
            raise UserError(f"{where}: a token has the same expert twice; expected distinct experts; record again")
        return ids_BSK


def layer_problem(layer: int, tensors: dict[str, StoredTensor], shape: RoutingShape) -> str | None:
    """What is wrong with a layer of a file, if anything."""
    ids = tensors.get(ids_name(layer))
    flags = tensors.get(flags_name(layer))
    if ids is None or flags is None:
        return f'no tensors "{ids_name(layer)}" and "{flags_name(layer)}"; record with the model that is trained'
    dtypes = ids.dtype, flags.dtype
    one_flag_each = flags.shape == ids.shape[:1]
    if dtypes != (IDS, FLAGS) or len(ids.shape) != 3 or not one_flag_each:
        return (
            f'"{ids_name(layer)}" is {ids.dtype} {list(ids.shape)}; expected {IDS} [sequences, tokens, choices] and '
            "a flag for each sequence; record with this version"
        )
    found = RoutingShape(*ids.shape)
    if found.tokens != shape.tokens:
        return f"layer {layer} has sequences of {found.tokens} tokens; expected data.seq_len = {shape.tokens}"
    if found.choices != shape.choices:
        return f"layer {layer} has {found.choices} experts for each token; expected {shape.choices} (model.moe.top_k)"
    if found.sequences < shape.sequences:
        return (
            f"layer {layer} has {found.sequences} sequences; expected {shape.sequences}, train.steps x "
            "train.global_batch; record more, or train fewer steps"
        )
    return None


def names_expert_twice(ids_BSK: np.ndarray) -> bool:
    ordered = np.sort(ids_BSK, axis=-1)
    next_ids = ordered[..., 1:]
    neighbours_equal = next_ids == ordered[..., :-1]
    is_expert = next_ids >= 0
    return bool((neighbours_equal & is_expert).any())


def map_rows(tensor: StoredTensor, dtype: type) -> np.ndarray:
    path = str(tensor.file)
    return np.memmap(path, dtype, "r", tensor.offset, tensor.shape)
