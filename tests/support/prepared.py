"""Prepared folders for tests: small parts, shards and chapters, so that little text has many of each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.config.run import DataConfig
from moefold.data import document_stream, prepare
from moefold.data.prepare import PrepareJob, prepare_data
from moefold.data.prepared_corpus import PreparedCorpus, open_prepared
from moefold.data.prepared_folder import PreparedIndex
from moefold.data.tokenizer import ByteTokenizer


def small_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prepare, "PART_BYTES", 20_000)
    patch.setattr(prepare, "SHARD_TOKENS", 4_000)
    patch.setattr(document_stream, "CHAPTER_TOKENS", 10_000)
    patch.setattr(document_stream, "MAPPED_BYTES", 20_000)


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def varied_texts(count: int, name: str = "") -> list[str]:
    """Texts that all differ, of 20 to 250 characters."""
    chance = random.Random(count)
    return [
        f"{name} text {number} of many: " + "abcdefgh"[number % 8] * chance.randint(0, 230) for number in range(count)
    ]


def prepared(out: Path, *files: Path | str, workers: int = 1, **settings: object) -> PreparedIndex:
    """`moefold data prepare` with bytes as tokens."""
    data = DataConfig(source="files", files=tuple(map(str, files)), tokenizer="byte")
    data = replace(data, **settings)  # pyright: ignore[reportArgumentType]
    return prepare_data(PrepareJob(out, data, 256), workers, lambda line: None)


def opened(*folders: Path, seq_len: int = 16, **settings: object) -> tuple[PreparedCorpus, DataConfig]:
    data = DataConfig(source="prepared", files=tuple(map(str, folders)), seq_len=seq_len, tokenizer="byte")
    data = replace(data, **settings)  # pyright: ignore[reportArgumentType]
    return open_prepared(data, ByteTokenizer(), 256), data
