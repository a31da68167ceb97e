"""Samples that `data.seq_len` cuts are counted, in memory and in prepared folders; a sample that loses every trained
token is refused with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import load_corpus
from moefold.data.cut_samples import CutSamples
from moefold.data.tokenizer import ByteTokenizer
from tests.support.prepared import opened, prepared, small_sizes

SEQ = 16
SETTINGS: dict[str, Any] = {"seq_len": SEQ, "attend": "document", "packing": "best_fit", "held_out": 0.1}
PROMPTS = (3, 15, 16, 17, 40)  # tokens before the first trained one; of the last two, none is left
RESPONSES = (1, 13, 30)


def write_pairs(path: Path, prompts: tuple[int, ...]) -> Path:
    pairs = [{"prompt": "p" * p, "response": "r" * r} for p in prompts for r in RESPONSES] * 40
    path.write_text("\n".join(map(json.dumps, pairs)))
    return path


def counted(mask_of_each: list[list[bool]]) -> CutSamples:
    """By the definition: a sample has as many inputs as tokens before its end, and the labels behind them."""
    cut = [mask for mask in mask_of_each if len(mask) - 1 > SEQ]
    untrained = [mask for mask in cut if True not in mask[1 : SEQ + 1]]
    longest = max(len(mask) - 1 for mask in mask_of_each)
    return CutSamples(len(mask_of_each), len(cut), len(untrained), longest)


def masks_of(text: bytes) -> list[list[bool]]:
    """Of the prompts and responses that a row has, an end token behind each pair."""
    return [[byte != ord("p") for byte in sample + b"\0"] for sample in text.split(b"\0")[:-1]]


def test_cut_samples_of_prepared_folders_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small_sizes(monkeypatch)
    file = write_pairs(tmp_path / "pairs.jsonl", PROMPTS)
    prepared(tmp_path / "out", file, format="pairs", held_out=0.1)
    shards = [path.read_bytes() for path in (tmp_path / "out" / "train").glob("*.tokens")]
    assert len(shards) > 1
    corpus, data = opened(tmp_path / "out", **SETTINGS)
    cuts = corpus.packed_sequences(data, 1, 4).cut_samples()
    assert cuts == counted([mask for shard in shards for mask in masks_of(shard)])
    assert 0 < cuts.untrained < cuts.cut < cuts.samples


def test_cut_samples_in_memory_are_counted_and_texts_have_none(tmp_path: Path):
    file = write_pairs(tmp_path / "pairs.jsonl", PROMPTS[:3])
    data = DataConfig(source="files", files=(str(file),), format="pairs", tokenizer="byte", **SETTINGS)
    corpus = load_corpus(data, ByteTokenizer(), 256)
    cuts = corpus.packed_sequences(data, 1, 4).cut_samples()
    assert cuts == counted(masks_of(corpus.train.tobytes()))
    assert cuts.untrained == 0 < cuts.cut < cuts.samples
    as_text = replace(corpus, train_mask=None)
    assert as_text.packed_sequences(data, 1, 4).cut_samples() == CutSamples()


def test_a_sample_that_loses_every_trained_token_is_refused_with_its_line_or_counted(tmp_path: Path):
    file = write_pairs(tmp_path / "pairs.jsonl", PROMPTS[:3])
    lines = file.read_text()
    file.write_text(lines + "\n" + json.dumps({"prompt": "p" * 17, "response": "rr"}))
    data = DataConfig(source="files", files=(str(file),), format="pairs", tokenizer="byte", **SETTINGS)
    line = len(lines.splitlines()) + 1
    expected = rf"line {line} has its first trained token behind 17 others; .* set data.seq_len to at least 19"
    with pytest.raises(UserError, match=expected):
        load_corpus(data, ByteTokenizer(), 256)
    without = load_corpus(replace(data, skip_bad=True), ByteTokenizer(), 256)
    assert len(without.skipped) == 1
    for changes in ({"seq_len": 19}, {"packing": "windows"}):  # windows go on with the rest of a sample
        whole = load_corpus(replace(data, **changes), ByteTokenizer(), 256)
        assert len(whole.train_starts) + len(whole.held_out_starts) == line
