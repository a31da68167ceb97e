"""Where text comes from. Each source yields documents in an order that does not change from run to run."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from moefold.config.errors import UserError, printable_text
from moefold.config.run import DataConfig

Documents = Iterator[str]


def source_documents(data: DataConfig) -> Documents:
    return stdlib_documents() if data.source == "stdlib" else file_documents(data)


def stdlib_documents() -> Documents:
    """The source of Python's own library, from the interpreter that runs this. Needs no download."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    found = 0
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if skipped & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few files of the library are in other encodings on purpose
        found += 1
        yield text
    if not found:
        raise UserError(
            f"data.source = stdlib, but there is no Python source in {root}; "
            "name your own text with --data.source files --data.files corpus.txt"
        )


def file_documents(data: DataConfig) -> Documents:
    """The named files, and all .txt, .md, .py and .jsonl files of named folders."""
    for name in data.files:
        try:
            path = Path(name).expanduser()
            is_folder = path.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"data.files: {printable_text(name)} is no usable path ({error}); expected a file or folder"
            ) from None
        if is_folder:
            inside = [
                p for p in sorted(path.rglob("*")) if p.suffix in (".txt", ".md", ".py", ".jsonl") and p.is_file()
            ]
            if not inside:
                raise UserError(f"data.files: the folder {path} holds no .txt, .md, .py or .jsonl file")
            for each in inside:
                yield from read_documents(each, data.text_key)
        else:
            yield from read_documents(path, data.text_key)


def read_documents(path: Path, text_key: str) -> Documents:
    text = read_utf8_text(path)
    if path.suffix == ".jsonl":
        yield from read_jsonl_texts(path, text, text_key)
    else:
        yield text


def read_utf8_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"data.files: no file {path}; expected a text or .jsonl file or a folder of them") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"data.files: cannot read {printable_text(str(path))}: {why}; expected a readable file"
        ) from None
    if not raw.strip():
        raise UserError(f"data.files: {path} is empty; expected text to train on")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.files: {path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert it, for instance with iconv -f latin1 -t utf-8"
        ) from None


def read_jsonl_texts(path: Path, text: str, text_key: str) -> Documents:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"data.files: {path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place} is not JSON ({str(error)[:100]}); expected one object a line") from None
        if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
            has = f"has the fields {', '.join(map(str, record))}" if isinstance(record, dict) else "is no object"
            raise UserError(f'{place} {has}; expected a text in "{text_key}" (set data.text_key to change that)')
        if any("\ud800" <= c <= "\udfff" for c in record[text_key]):
            raise UserError(f"{place} holds half of a surrogate pair, which is no character; mend or remove that line")
        yield record[text_key]
