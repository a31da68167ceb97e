"""Kinds of files that are no text, recognised by their first bytes or their name: what each is, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TO_JSONL = "write its rows as .jsonl, one object a line with the text in data.text_key"


class FileKind(NamedTuple):
    """`article_and_name`: such as "a gzip archive". `advice` completes "..., then name the result"."""

    article_and_name: str
    advice: str


KINDS_BY_FIRST_BYTES = {
    b"\x1f\x8b": FileKind("a gzip archive", "decompress it with gzip -dk, or end its name in .gz"),
    b"\x28\xb5\x2f\xfd": FileKind("a zstd archive", "decompress it with zstd -d, or end its name in .zst"),
    b"\xfd7zXZ\x00": FileKind("an xz archive", "decompress it with xz -dk"),
    b"BZh": FileKind("a bzip2 archive", "decompress it with bzip2 -dk"),
    b"PK\x03\x04": FileKind("a zip archive", "unpack it with unzip"),
    b"PAR1": FileKind("a Parquet file", "end its name in .parquet"),
    b"ARROW1": FileKind("an Arrow file", "end its name in .arrow"),
    b"\x93NUMPY": FileKind("a numpy array", "end its name in .npy"),
    b"\x89HDF": FileKind("an HDF5 file", TO_JSONL),
    b"SQLite format 3": FileKind("an SQLite database", TO_JSONL),
    b"%PDF": FileKind("a PDF", "extract its text with pdftotext"),
    b"\x7fELF": FileKind("a program", "name a text instead"),
    b"\xff\xfe": FileKind("UTF-16 text", "convert it with iconv -f utf-16 -t utf-8"),
    b"\xfe\xff": FileKind("UTF-16 text", "convert it with iconv -f utf-16 -t utf-8"),
}
TABLE_SUFFIXES = {".csv": "a table with commas", ".tsv": "a table with tabs"}


def file_kind(path: Path, raw: bytes) -> FileKind | None:
    """The kind of a file that is no text; None for what may be text."""
    for first_bytes, kind in KINDS_BY_FIRST_BYTES.items():
        if raw.startswith(first_bytes):
            return kind
    suffix = path.suffix.lower()
    if suffix in TABLE_SUFFIXES:
        return FileKind(TABLE_SUFFIXES[suffix], f"{TO_JSONL} (csv.DictReader, json.dumps)")
    if b"\x00" in raw:
        return FileKind(f"binary: byte 0x00 at offset {raw.index(0)}", "extract its text")
    return None
