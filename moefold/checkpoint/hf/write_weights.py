"""Writing of a Hugging Face model folder: safetensors in shards with an index, config.json, tokenizer files.

Tensors are written one at a time; headers follow from the name table. The folder is written under a temporary name and
renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from moefold.checkpoint.format.safetensors_header import DTYPE_BYTES, HeaderEntry, encode_safetensors_header
from moefold.checkpoint.format.storage import METADATA_BYTES, require_free_space
from moefold.checkpoint.hf.model_folder import INDEX_FILE, SINGLE_FILE, file_in_folder
from moefold.config.errors import UserError

SHARD_BYTES = 5 * 10**9  # bytes of a file, unless one tensor is larger
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class PlannedTensor:
    """Name, shape and dtype of a tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def dtype_code(self) -> str:
        return DTYPE_CODES[self.dtype]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype_code]


TensorStream = Iterator[tuple[str, torch.Tensor]]  # in the order of the plan


def write_model_folder(
    out: Path,
    options: dict[str, Any],
    planned: list[PlannedTensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write config.json and the tensors, which come in the order of the plan. `tokenizer` is a folder whose tokenizer
    files are copied."""
    with staging_folder(out, planned, overwrite) as staging:
        write_tensor_files(staging, planned, iter(tensors))
        write_json(staging / "config.json", options)
        if tokenizer:
            copy_tokenizer_files(tokenizer, staging)
        remove_former_weights(out)
        move_into_place(staging, out)


@contextmanager
def staging_folder(out: Path, planned: list[PlannedTensor], overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` to write into, on a disk with room for these tensors, until the files are complete and
    moved into place."""
    check_output_folder(out, overwrite)
    staging = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    require_free_space(out.parent, total_bytes(planned) + METADATA_BYTES)
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def total_bytes(planned: list[PlannedTensor]) -> int:
    return sum(tensor.bytes for tensor in planned)


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2)
    path.write_text(text + "\n")


def copy_tokenizer_files(tokenizer: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(file_in_folder(tokenizer, name), target / name)


def check_output_folder(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; expected a folder to write into")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} is not empty; choose another folder, or replace the model in it with --overwrite")


def remove_former_weights(out: Path) -> None:
    """Remove the weights in an existing folder, and nothing else."""
    shards = out.glob("model-*.safetensors")
    for former in (*shards, out / SINGLE_FILE, out / INDEX_FILE):
        former.unlink(missing_ok=True)


def move_into_place(staging: Path, out: Path) -> None:
    """Give the staging folder its name. In an existing folder, files of the same names are replaced."""
    if not out.exists():
        os.rename(staging, out)
        return
    for file in staging.iterdir():
        os.replace(file, out / file.name)


def write_tensor_files(folder: Path, planned: list[PlannedTensor], tensors: TensorStream) -> None:
    shards = split_into_shards(planned)
    names = shard_file_names(len(shards))
    weight_map: dict[str, str] = {}
    for file_name, shard in zip(names, shards, strict=True):
        weight_map |= {tensor.name: file_name for tensor in shard}
        write_shard_file(folder / file_name, shard, tensors)
    if len(shards) > 1:
        metadata = {"total_size": total_bytes(planned)}
        write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})


def shard_file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def split_into_shards(planned: list[PlannedTensor]) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards


def write_shard_file(path: Path, shard: list[PlannedTensor], tensors: TensorStream) -> None:
    with path.open("wb") as file:
        write_shard(file, shard, tensors)
        file.flush()
        os.fsync(file.fileno())


def write_shard(file: BinaryIO, shard: list[PlannedTensor], tensors: TensorStream) -> None:
    file.write(encode_shard_header(shard))
    for planned in shard:
        name, tensor = next(tensors)
        shape = tuple(tensor.shape)
        actual = PlannedTensor(name, shape, tensor.dtype)
        if actual != planned:
            raise ValueError(f"{actual} came where {planned} was planned")
        on_host = tensor.detach().cpu()
        flat = on_host.contiguous().flatten()
        raw = flat.view(torch.uint8).numpy()
        file.write(raw.data)


def encode_shard_header(shard: list[PlannedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in shard:
        end = begin + tensor.bytes
        entry = HeaderEntry(tensor.dtype_code, tensor.shape, begin, end)
        header[tensor.name] = entry.as_json()
        begin = end
    return encode_safetensors_header(header)
