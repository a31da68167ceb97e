"""The byte-pair vocabulary of Python's standard library, `moefold/data/stdlib_tokenizer/`, made again.

    python -m tests.support.stdlib_tokenizer moefold/data/stdlib_tokenizer/tokenizer.json

The file is a function of the text and of `train_byte_pairs` (data/tokenizer_engine.py); the library of CPython 3.11.7
on aarch64 and tokenizers 0.23.3 made the one in the package. Training is on whole documents, in the order of
`stdlib_documents`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moefold.data.documents import stdlib_documents
from moefold.data.tokenizer import STDLIB_ENTRIES
from moefold.data.tokenizer_engine import train_byte_pairs

MADE_WITH = ("3.11.7", "0.23.3", "aarch64")  # Python, tokenizers, and the machine, whose build settings are a file
END_TOKEN = "<|endoftext|>"


def train_stdlib_vocabulary() -> str:
    return train_byte_pairs(stdlib_documents(), STDLIB_ENTRIES, END_TOKEN)


def main(path: str) -> None:
    text = train_stdlib_vocabulary()
    Path(path).write_text(text, encoding="utf-8")
    print(f"wrote {path}: {len(text.encode()) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
