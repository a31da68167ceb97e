"""Samples as people read them: what is painted is what is trained, and the text is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from moefold.config.run import DataConfig
from moefold.data.document_split import DocumentTokens
from moefold.data.show_samples import SampleView, paint_green, painted_text, put_in_brackets
from moefold.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.support.prepared import prepared


def masked(text: str, trained: str) -> DocumentTokens:
    """A text of bytes, trained where the second text has an x; its last letter is that of the end token."""
    ids = ByteTokenizer().encode(text)
    return DocumentTokens(ids, np.array([each == "x" for each in trained]))


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ("xxxxxx", "[[ab\ncdNUL]]"),
        ("......", "ab\ncdNUL"),
        ("x.....", "[[a]]b\ncdNUL"),
        (".xx.xx", "a[[b\n]]c[[dNUL]]"),
        (".....x", "ab\ncd[[NUL]]"),
    ],
)
def test_what_is_trained_is_between_brackets(trained: str, expected: str):
    assert painted_text(masked("ab\ncd", trained), ByteTokenizer(), put_in_brackets) == expected


def test_a_text_cannot_steer_the_terminal():
    shown = painted_text(masked("a\x1b[2Jb\t", "xxxxxxxx"), ByteTokenizer(), paint_green)
    assert shown == "\x1b[32ma\\x1b[2Jb\tNUL\x1b[0m"


def test_special_tokens_are_shown():
    tokenizer = load_tokenizer("stdlib", 2000)
    ids = np.append(tokenizer.encode("def f"), tokenizer.end.id)
    text = painted_text(DocumentTokens(ids), tokenizer, put_in_brackets)
    assert text == f"[[def f{tokenizer.end.text}{tokenizer.end.text}]]"


def test_a_prepared_folder_shows_what_its_source_shows_before(tmp_path: Path):
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{n} is ", "response": str(n)} for n in range(40)]
    file.write_text("\n".join(map(json.dumps, pairs)))
    prepared(tmp_path / "out", file, format="pairs", held_out=0.1)
    lines: list[str] = []
    view = SampleView(0, 2, put_in_brackets, lines.append)
    view.show_folder(tmp_path / "out", "train")
    from_folder = lines.copy()
    lines.clear()
    view.show_file(DataConfig(source="files", files=(str(file),), format="pairs", tokenizer="byte"), 256)
    assert from_folder == lines == ["document 0: 7 tokens, 2 trained", "0 is [[0NUL]]\n", lines[2], "1 is [[1NUL]]\n"]
    # Of "7 is 7" a length of 5 leaves the first trained token as a label, of "17 is 17" none.
    view.seq_len = 5
    view.show_file(DataConfig(source="files", files=(str(file),), format="pairs", tokenizer="byte"), 256)
    of_all = "data.seq_len = 5 cuts 40 of 40 samples, 30 of them before the first trained token; set data.seq_len to 8"
    assert lines[-1] == f"{of_all} for whole samples"
    counts: list[list[int]] = []
    for side in ("train", "held_out"):
        view.show_folder(tmp_path / "out", side)
        counts.append([int(number) for number in re.findall(r"\d+", lines[-1])])
    (_, cut, samples, untrained, longest), (_, *held_out) = counts
    assert [cut + held_out[0], samples + held_out[1], untrained + held_out[2], longest] == [40, 40, 30, 8]
