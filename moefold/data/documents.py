"""Sources of text. Each yields entries in an order that is the same in every run."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moefold.config.errors import UserError, printable_text
from moefold.config.extensions import find_extension
from moefold.config.run import DataConfig
from moefold.data.entries import Entries
from moefold.data.readers import Piece, field_to_read, read_piece

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
READ_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")
DATASET_STATE, DATASET_SPLITS = "state.json", "dataset_dict.json"  # of the datasets library's save_to_disk


def source_entries(data: DataConfig) -> Entries:
    extension = find_extension("data_source", data.source)
    if extension is not None:
        return extension.load()(data)
    if data.source == "stdlib":
        return stdlib_documents()
    return file_entries(data)


def stdlib_documents() -> Iterator[str]:
    """The source of Python's standard library, from the running interpreter. Needs no download."""
    root = Path(sysconfig.get_path("stdlib"))
    count = 0
    names: list[str] = []
    for path in root.rglob("*.py"):
        names.append(path.relative_to(root).as_posix())
    for name in sorted(names):
        if SKIPPED_FOLDERS & set(Path(name).parts):
            continue
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few files of the library are in other encodings on purpose
        count += 1
        yield text
    if not count:
        raise UserError(
            f"data.source = stdlib, but there is no Python source in {root}; "
            "name your own text with --data.source files --data.files corpus.txt"
        )


def file_entries(data: DataConfig) -> Entries:
    """The named files, and all files of named folders that can be read. Files of a folder may be empty, as the
    __init__.py of a package often is."""
    for name in data.files:
        found = 0
        for path in named_files(name):
            for entry in read_piece(Piece(path), field_to_read(data)):
                found += 1
                yield entry
        if not found:
            raise UserError(f"data.files: {name} is empty; expected text to train on")


def named_files(name: str) -> list[Path]:
    """The file of that name, or the files of the folder of that name."""
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        shown = printable_text(name)
        raise UserError(f"data.files: {shown} is no usable path ({error}); expected a file or folder") from None
    if not is_folder:
        return [path]
    if (path / DATASET_SPLITS).is_file():
        return named_files(str(only_split(path)))
    if (path / DATASET_STATE).is_file():
        return dataset_files(path)
    files: list[Path] = []
    for file in sorted(path.rglob("*")):
        index = file.with_suffix(".idx")
        is_megatron = file.suffix == ".bin" and index.is_file()
        is_read = is_megatron or file.name.endswith(READ_SUFFIXES)
        if is_read and file.is_file():
            files.append(file)
    if not files:
        suffixes = ", ".join(READ_SUFFIXES)
        raise UserError(f"data.files: the folder {path} holds no {suffixes} or Megatron .bin file")
    return files


def only_split(folder: Path) -> Path:
    """The one split of a saved DatasetDict; several are refused, since one of them is probably there to test on."""
    splits = read_json(folder / DATASET_SPLITS).get("splits")
    if not isinstance(splits, list) or len(splits) != 1:
        shown = ", ".join(map(str, splits or ()))
        raise UserError(f"data.files: {folder} holds the splits {shown}; name one of them, such as {folder / 'train'}")
    return folder / str(splits[0])


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a dataset that the datasets library saved, in its order."""
    state = read_json(folder / DATASET_STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UserError(f"data.files: {folder} is a selection of rows; save it again after flatten_indices()")
    listed = state.get("_data_files") or []
    names = [str(entry.get("filename")) for entry in listed]
    leaving = [name for name in names if Path(name).name != name]
    if leaving or not names:
        raise UserError(f"data.files: {folder / DATASET_STATE} names no Arrow files in its folder; save it again")
    return [folder / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.files: {path} is not JSON ({str(error)[:100]}); save the dataset again") from None
    if not isinstance(content, dict):
        raise UserError(f"data.files: {path} holds no object; save the dataset again")
    return content
