"""A Hugging Face model folder: config.json and safetensors files from anywhere, checked before anything is read.
Torch-free.

An index names the files, or there is one, model.safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.checkpoint.format.safetensors_header import StoredTensor, tensors_in_file
from moefold.config.bounded_files import read_bounded_file
from moefold.config.errors import UserError, printable_text

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MOST_LINES = 20  # of one error message


@dataclass(frozen=True)
class ModelFolder:
    path: Path
    options: dict[str, Any]  # config.json
    tensors: dict[str, StoredTensor]


def open_model_folder(path: Path) -> ModelFolder:
    """The folder's config.json and every tensor of its files, or a refusal."""
    if not path.is_dir():
        raise UserError(f"no folder {path}; expected one with config.json and safetensors files")
    options = read_json_file(file_in_folder(path, "config.json"))
    return ModelFolder(path, options, tensors_in_folder(path))


def file_in_folder(folder: Path, name: str) -> Path:
    """The path of a file of the folder. Names and links that lead out of the folder are refused. An exception are the
    snapshots of the hub's cache, which are links into its blobs."""
    if not is_plain_name(name):
        raise UserError(f'{folder} names the file "{printable_text(str(name))}"; expected a plain name, without a path')
    file = folder / name
    real = file.resolve()
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if real.parent not in allowed:
        raise UserError(f"{file} is a link that leaves the folder, to {real}; put the file itself there")
    if not real.is_file():
        raise UserError(f"no file {file}; the folder is not complete")
    return real


def is_plain_name(name: Any) -> bool:
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return Path(name).name == name


def read_json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {printable_text(str(error))}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def tensors_in_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of a folder, by its index if it has one."""
    if (folder / INDEX_FILE).exists():
        return tensors_by_index(folder)
    if (folder / SINGLE_FILE).exists():
        return tensors_in_file(file_in_folder(folder, SINGLE_FILE))
    pickled = [path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES]
    reason = "nothing to read"
    if pickled:
        reason = f"it holds {printable_text(min(pickled))}, a pickled file, which is never opened"
    raise UserError(f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}: {reason}; save the model as safetensors")


def tensors_by_index(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the files that an index names. An index that contradicts the files is refused."""
    weight_map = read_weight_map(folder)
    files = sorted(set(weight_map.values()))
    tensors_by_file: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        stored = tensors_in_file(file_in_folder(folder, file))
        tensors_by_file[file] = stored
        tensors |= stored
    # Index and files must name the same tensors.
    problems: list[str] = []
    for name, file in weight_map.items():
        if name not in tensors_by_file[file]:
            shown = printable_text(name)
            problems.append(f'"{shown}" is not in {printable_text(file)}, where {INDEX_FILE} says it is')
    for name in tensors:
        if name not in weight_map:
            problems.append(f'"{printable_text(name)}" is in a file, but not in {INDEX_FILE}')
    if problems:
        raise UserError(f"{folder}: the index does not agree with the files:", *first_few_lines(problems))
    return tensors


def read_weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor, from the index."""
    index = folder / INDEX_FILE
    content = read_json_file(file_in_folder(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(content, dict) or not content:
        raise UserError(f"{index} has no weight_map; expected the file of every tensor")
    weight_map = {name: str(file) for name, file in content.items()}
    for file in sorted(set(weight_map.values())):
        if not file.endswith(".safetensors"):
            raise UserError(f'{index} names "{printable_text(file)}"; only safetensors files are read')
    return weight_map


def first_few_lines(lines: list[str], most: int = MOST_LINES) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"and {len(lines) - most} more"]
