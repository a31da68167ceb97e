"""Bits per byte, by an oracle that counts the bytes of each byte pair."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import moefold
from moefold.data.tokenizer import HuggingFaceTokenizer
from moefold.layout.labels import IGNORE_INDEX
from moefold.train.assemble import Run
from moefold.train.evaluate import bits_per_byte, bytes_per_label, sample_prompt
from tests.support.runs import corpus

SMALLEST = {"model__layers": 1, "model__hidden": 16, "model__moe__ffn": 16, "data__seq_len": 32}


def bytes_of_labels(run: Run) -> list[int]:
    """The length of each label's entry: the vocabulary writes every byte as one letter."""
    tokenizer = run.tokenizer
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    sizes: list[int] = []
    for number in range(run.config.train.validate_sequences):
        labels = run.validation.sequences.arrays(number).labels.tolist()
        entries = [tokenizer.engine.id_to_token(label) for label in labels if label != IGNORE_INDEX]
        sizes += [0 if entry == tokenizer.end.text else len(entry) for entry in entries]
    return sizes


def test_bytes_of_predicted_tokens_are_counted(tmp_path: Path):
    *_, path = corpus(tmp_path)
    files = {"data__source": "files", "data__files": (path,), "data__attend": "document"}
    keys = {"data__tokenizer": "stdlib", "model__vocab": 1024, "train__validate_sequences": 5, **files, **SMALLEST}
    with moefold.run(moefold.preset("tiny", **keys)) as training:
        sizes = bytes_of_labels(training.run)
        assert bytes_per_label(training.run) == pytest.approx(sum(sizes) / len(sizes))
        assert sum(sizes) / len(sizes) > 1.2, "entries are longer than bytes"
        assert sample_prompt(training.run.tokenizer) == "def"


def test_tokens_that_are_no_text_have_no_bytes():
    with moefold.run(moefold.preset("tiny", data__source="zipf", **SMALLEST)) as training:
        assert bytes_per_label(training.run) == 0


def test_a_uniform_guess_over_bytes_takes_eight_bits():
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8)
    assert bits_per_byte(math.log(256), 4.0) == pytest.approx(2)
