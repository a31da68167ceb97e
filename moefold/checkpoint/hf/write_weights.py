"""Write a folder that `transformers` loads: safetensors in shards with an index, config.json, tokenizer files.

Tensors go to the disk one at a time; headers are known before, from the table. The folder is written aside and gets its
name when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from moefold.checkpoint.hf.model_folder import DTYPE_BYTES, INDEX_FILE, SINGLE_FILE, file_in_folder
from moefold.checkpoint.live.save import METADATA_BYTES, require_free_space
from moefold.config.errors import UserError

SHARD_BYTES = 5 * 10**9  # bytes of a file, unless one tensor is larger
DTYPE_CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[DTYPE_CODES[self.dtype]]


def write_model_folder(
    out: Path,
    options: dict[str, Any],
    planned: list[PlannedTensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Path | None = None,
    overwrite: bool = False,
) -> None:
    """`tensors` come in the order of the plan. `tokenizer` is a folder whose tokenizer files are copied."""
    check_output_folder(out, overwrite)
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    require_free_space(out.parent, sum(each.bytes for each in planned) + METADATA_BYTES)
    aside.mkdir()
    try:
        write_tensor_files(aside, planned, iter(tensors))
        (aside / "config.json").write_text(json.dumps(options, indent=2) + "\n")
        for name in TOKENIZER_FILES:
            if tokenizer and (tokenizer / name).exists():
                shutil.copyfile(file_in_folder(tokenizer, name), aside / name)
        move_into_place(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_output_folder(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; expected a folder to write into")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} is not empty; choose another folder, or replace the model in it with --overwrite")


def move_into_place(aside: Path, out: Path) -> None:
    """Move what was written. Of a folder that is there, the former weights go; nothing else is touched."""
    if not out.exists():
        os.rename(aside, out)
        return
    for former in [*out.glob("model-*.safetensors"), out / SINGLE_FILE, out / INDEX_FILE]:
        former.unlink(missing_ok=True)
    for file in aside.iterdir():
        os.replace(file, out / file.name)


def write_tensor_files(folder: Path, planned: list[PlannedTensor], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    shards = split_into_shards(planned)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [SINGLE_FILE]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            write_shard_file(file, shard, tensors)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        places = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        total = {"total_size": sum(each.bytes for each in planned)}
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": total, "weight_map": places}, indent=2) + "\n")


def split_into_shards(planned: list[PlannedTensor]) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for each in planned:
        if shards[-1] and size + each.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(each)
        size += each.bytes
    return shards


def write_shard_file(file: BinaryIO, shard: list[PlannedTensor], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for each in shard:
        place = [at, at + each.bytes]
        header[each.name] = {"dtype": DTYPE_CODES[each.dtype], "shape": list(each.shape), "data_offsets": place}
        at += each.bytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # tensors begin at multiples of eight
    file.write(struct.pack("<Q", len(raw)) + raw)
    for each in shard:
        name, tensor = next(tensors)
        if (name, tuple(tensor.shape), tensor.dtype) != (each.name, each.shape, each.dtype):
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} came where {each} was planned")
        file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
