"""The vocabulary that a run trains on its own text: what of the text training reads, and what it makes of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import load_corpus
from moefold.data.tokenizer import load_tokenizer
from moefold.data.trained_vocabulary import EXCERPT, read_text_sides, spread_excerpts, train_vocabulary

VOCAB = 300
texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=80), max_size=30)


@settings(deadline=None)
@given(texts, st.integers(1, 3000))
def test_excerpts_are_the_whole_of_a_short_text_and_bounded_in_a_long_one(documents: list[str], limit: int):
    given_texts = [document * 900 for document in documents]
    excerpts = list(spread_excerpts(given_texts, limit))
    total = sum(map(len, given_texts))
    if total <= limit:
        assert "".join(excerpts) == "".join(given_texts)
    assert sum(map(len, excerpts)) <= limit + EXCERPT


def test_excerpts_of_a_long_text_come_from_all_of_it():
    text = "".join(chr(ord("a") + number) * EXCERPT for number in range(20))
    excerpts = list(spread_excerpts([text], 5 * EXCERPT))
    assert [excerpt[0] for excerpt in excerpts] == ["a", "e", "i", "m", "q"]


def write_documents(folder: Path) -> DataConfig:
    """Documents that each have a word of their own, over and over."""
    lines: list[str] = []
    for number in range(60):
        word = "".join(chr(ord("a") + (number // 26**place) % 26) for place in range(3)) * 3
        lines.append(json.dumps({"text": f"{word} " * 40}))
    (folder / "own.jsonl").write_text("\n".join(lines))
    return DataConfig(source="files", files=(str(folder / "own.jsonl"),), tokenizer="trained", held_out=0.2, seq_len=8)


def corpus_of(data: DataConfig, folder: Path):
    path = folder / "tokenizer.json"
    path.write_text(train_vocabulary(data, VOCAB))
    tokenizer = load_tokenizer(str(path), VOCAB)
    return tokenizer, load_corpus(data, tokenizer, VOCAB)


def test_what_is_held_out_takes_no_part_in_the_vocabulary(tmp_path: Path):
    """Other held-out documents, of the same lengths and at the same places, give the same vocabulary to the byte."""
    data = write_documents(tmp_path)
    first = train_vocabulary(data, VOCAB)
    sides = read_text_sides(data)
    assert len(sides.held_out) == 12
    path = Path(data.files[0])
    changed = path.read_text()
    for document in sides.held_out:
        changed = changed.replace(document, "z" * len(document))
    path.write_text(changed)
    assert train_vocabulary(data, VOCAB) == first
    assert {document[0] for document in read_text_sides(data).held_out} == {"z"}


def test_the_corpus_is_the_split_text_in_tokens_of_a_vocabulary_of_the_models_size(tmp_path: Path):
    data = write_documents(tmp_path)
    tokenizer, corpus = corpus_of(data, tmp_path)
    assert tokenizer.size == VOCAB
    assert tokenizer.end.id == 0
    sides = read_text_sides(data)
    for tokens, starts, documents in (
        (corpus.train, corpus.train_starts, sides.train),
        (corpus.held_out, corpus.held_out_starts, sides.held_out),
    ):
        parts = np.split(tokens, starts[1:])
        assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == documents
        assert all(part[-1] == tokenizer.end.id for part in parts)
    assert len(corpus.train) < 0.7 * sum(map(len, sides.train))


def test_a_long_document_is_cut_and_nothing_of_it_is_lost(tmp_path: Path):
    text = "été und other lines\n" * 3000
    (tmp_path / "x.txt").write_text(text)
    data = DataConfig(source="files", files=(str(tmp_path / "x.txt"),), tokenizer="trained")
    sides = read_text_sides(data)
    assert "".join([*sides.train, *sides.held_out]) == text
    assert len(sides.held_out[0]) == pytest.approx(0.05 * len(text), rel=0.1)


def test_token_ids_are_refused_where_a_vocabulary_is_to_be_trained(tmp_path: Path):
    np.save(tmp_path / "ids.npy", np.arange(300, dtype=np.uint16))
    data = DataConfig(source="files", files=(str(tmp_path / "ids.npy"),), tokenizer="trained")
    with pytest.raises(UserError, match=r"ids\.npy.*token ids, but data\.tokenizer = trained needs text"):
        train_vocabulary(data, VOCAB)


def test_a_named_end_token_is_the_first_of_the_vocabulary(tmp_path: Path):
    (tmp_path / "x.txt").write_text("a line\n" * 100)
    data = DataConfig(source="files", files=(str(tmp_path / "x.txt"),), tokenizer="trained", end_token="<end>")
    entries = json.loads(train_vocabulary(data, VOCAB))["model"]["vocab"]
    assert entries["<end>"] == 0
    assert len(entries) < VOCAB, "no two tokens are left to merge"
