"""A folder of safetensors as strangers write them: everything in it is checked before anything is read. Torch-free.

Files are named by an index or there is one, model.safetensors. A header is read by ourselves, within bounds, so that a
file that lies about itself is refused in one line; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from moefold.checkpoint.format.storage import StoragePath
from moefold.config.errors import UserError, printable_text

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER = 100 << 20  # bytes; safetensors itself takes no longer ones
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
EIGHT, FOUR, TWO = ("F64", "I64", "U64"), ("F32", "I32", "U32"), ("F16", "BF16", "I16", "U16")
ONE = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL")
DTYPE_BYTES = {dtype: size for size, dtypes in ((8, EIGHT), (4, FOUR), (2, TWO), (1, ONE)) for dtype in dtypes}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header describes it."""

    file: StoragePath
    dtype: str
    shape: tuple[int, ...]
    at: int  # the byte of the file where it begins


@dataclass(frozen=True)
class ModelFolder:
    path: Path
    options: dict[str, Any]  # config.json
    tensors: dict[str, StoredTensor]


def open_model_folder(path: Path) -> ModelFolder:
    """The folder's config.json and every tensor its files hold, or a refusal."""
    if not path.is_dir():
        raise UserError(f"no folder {path}; expected one with config.json and safetensors files")
    options = read_json_file(file_in_folder(path, "config.json"))
    return ModelFolder(path, options, tensors_in_folder(path))


def file_in_folder(folder: Path, name: str) -> Path:
    """A file of the folder. Names that lead elsewhere are refused, and so are links that do, but for those of the hub's
    own cache, whose snapshots are links into its blobs."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise UserError(f'{folder} names the file "{printable_text(str(name))}"; expected a plain name, without a path')
    real = (folder / name).resolve()
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent / "blobs")
    if real.parent not in homes:
        raise UserError(f"{folder / name} is a link that leaves the folder, to {real}; put the file itself there")
    if not real.is_file():
        raise UserError(f"no file {folder / name}; the folder is not complete")
    return real


def read_json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {printable_text(str(error))}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def tensors_in_folder(folder: Path) -> dict[str, StoredTensor]:
    """What the safetensors files of a folder hold, by its index if it has one."""
    if (folder / INDEX_FILE).exists():
        return tensors_by_index(folder)
    if (folder / SINGLE_FILE).exists():
        return tensors_in_file(file_in_folder(folder, SINGLE_FILE))
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    why = (
        f"it holds {printable_text(pickled[0])}, a pickled file, which is never opened"
        if pickled
        else "nothing to read"
    )
    raise UserError(f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}: {why}; save the model as safetensors")


def tensors_by_index(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the files that an index names. An index that says other than the files is refused."""
    places = read_json_file(file_in_folder(folder, INDEX_FILE)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{folder / INDEX_FILE} has no weight_map; expected the file of every tensor")
    names = sorted(set(map(str, places.values())))
    if strangers := [name for name in names if not name.endswith(".safetensors")]:
        raise UserError(
            f'{folder / INDEX_FILE} names "{printable_text(strangers[0])}"; only safetensors files are read'
        )
    homes = {name: tensors_in_file(file_in_folder(folder, name)) for name in names}
    there = {tensor: stored for held in homes.values() for tensor, stored in held.items()}
    wrong = [
        f'"{printable_text(tensor)}" is not in {printable_text(str(file))}, where {INDEX_FILE} says it is'
        for tensor, file in places.items()
        if tensor not in homes[str(file)]
    ]
    wrong += [
        f'"{printable_text(tensor)}" is in a file, but not in {INDEX_FILE}' for tensor in there if tensor not in places
    ]
    if wrong:
        raise UserError(f"{folder}: the index does not agree with the files:", *first_few_lines(wrong))
    return there


def first_few_lines(lines: list[str], most: int = 20) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def read_raw_header(file: StoragePath) -> bytes:
    """The header of a safetensors file, unread, if its length makes sense."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise UserError(
                f"{file} is no safetensors file: its header claims {length} bytes of {size}; fetch the file again"
            )
        return opened.read(length)


def tensors_in_file(file: StoragePath, raw: bytes | None = None) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, after checking that the file is as long as they need, to the byte."""
    raw = read_raw_header(file) if raw is None else raw
    size, length = file.stat().st_size, len(raw)
    try:
        entries = json.loads(raw, object_pairs_hook=refuse_repeated_names)
        entries.pop("__metadata__", None)
        found = {name: (e["dtype"], tuple(e["shape"]), tuple(e["data_offsets"])) for name, e in entries.items()}
        if not all(is_sound_entry(*entry) for entry in found.values()):
            raise ValueError("a tensor's shape and place do not agree")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is no safetensors file: {printable_text(str(error))}; fetch the file again") from None
    ends = 0
    for begin, end in sorted(place for _, _, place in found.values()):
        if begin != ends:
            raise UserError(
                f"{file} is damaged: its tensors overlap or leave gaps at byte {ends}; fetch the file again"
            )
        ends = end
    if ends != size - 8 - length:
        raise UserError(f"{file} has {size} bytes; its tensors need {ends + 8 + length}; fetch the file again")
    data = 8 + length
    return {name: StoredTensor(file, dtype, shape, data + begin) for name, (dtype, shape, (begin, _)) in found.items()}


def refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in its header")
    return found


def is_sound_entry(dtype: Any, shape: tuple[Any, ...], place: tuple[Any, ...]) -> bool:
    numbers = [*shape, *place]
    if dtype not in DTYPE_BYTES or len(place) != 2 or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        return False
    return place[1] - place[0] == prod(shape) * DTYPE_BYTES[dtype]
