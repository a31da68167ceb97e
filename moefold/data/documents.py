"""Sources of text. Each yields documents in an order that is the same in every run."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from moefold.config.errors import UserError, printable_text
from moefold.config.extensions import find_extension
from moefold.config.run import DataConfig
from moefold.data.file_kinds import file_kind

Documents = Iterator[str]

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def source_documents(data: DataConfig) -> Documents:
    extension = find_extension("data_source", data.source)
    if extension is not None:
        return extension.load()(data)
    if data.source == "stdlib":
        return stdlib_documents()
    return file_documents(data)


def stdlib_documents() -> Documents:
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


def file_documents(data: DataConfig) -> Documents:
    """The named files, and all .txt, .md, .py and .jsonl files of named folders."""
    for name in data.files:
        for path in named_files(name):
            yield from read_documents(path, data.text_key)


def named_files(name: str) -> list[Path]:
    """The file of that name, or the text files of the folder of that name."""
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        shown = printable_text(name)
        raise UserError(f"data.files: {shown} is no usable path ({error}); expected a file or folder") from None
    if not is_folder:
        return [path]
    files: list[Path] = []
    for file in sorted(path.rglob("*")):
        if file.suffix in TEXT_SUFFIXES and file.is_file():
            files.append(file)
    if not files:
        raise UserError(f"data.files: the folder {path} holds no .txt, .md, .py or .jsonl file")
    return files


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
        reason = getattr(error, "strerror", None) or error
        shown = printable_text(str(path))
        raise UserError(f"data.files: cannot read {shown}: {reason}; expected a readable file") from None
    if not raw.strip():
        raise UserError(f"data.files: {path} is empty; expected text to train on")
    kind = file_kind(path, raw)
    if kind is not None:
        raise UserError(
            f"data.files: {path} is {kind.article_and_name}; expected UTF-8 text or .jsonl; {kind.advice}, then name "
            "the result in data.files"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.files: {path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "if it is text in another encoding, convert it, for instance with iconv -f latin1 -t utf-8"
        ) from None


def read_jsonl_texts(path: Path, text: str, text_key: str) -> Documents:
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        yield read_jsonl_line(line, text_key, f"data.files: {path}, line {number}")


def read_jsonl_line(line: str, text_key: str, where: str) -> str:
    """The text of one line of a .jsonl file. `where` is for messages."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({str(error)[:100]}); expected one object a line") from None
    if not isinstance(record, dict):
        raise UserError(f'{where} is no object; expected a text in "{text_key}" (set data.text_key to change that)')
    text = record.get(text_key)
    if not isinstance(text, str):
        names = ", ".join(map(str, record))
        raise UserError(
            f'{where} has the fields {names}; expected a text in "{text_key}" (set data.text_key to change that)'
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where} holds half of a surrogate pair, which is no character; mend or remove that line")
    return text
