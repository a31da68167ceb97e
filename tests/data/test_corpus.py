"""The split into training and held-out text."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import Corpus, load_corpus, zipf_tokens
from moefold.data.document_split import DocumentTokens, split_documents
from moefold.data.tokenizer import ByteTokenizer

LINES = [f"line {number:06d} of the text\n" for number in range(60_000)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.5 MB, every line of it different."""
    file = tmp_path_factory.mktemp("text") / "lines.txt"
    file.write_text("".join(LINES))
    return file


def load(*files: Path, held_out: float = 0.05, seq_len: int = 256) -> Corpus:
    data = DataConfig(source="files", files=tuple(map(str, files)), held_out=held_out, seq_len=seq_len)
    return load_corpus(data, ByteTokenizer(), 256)


def lines_of(tokens: np.ndarray) -> set[str]:
    return set(bytes(tokens).decode().replace("\x00", "").splitlines(keepends=True))


def test_both_sides_together_are_the_text_and_share_nothing(text: Path):
    corpus = load(text, held_out=0.2)
    train, held_out = lines_of(corpus.train), lines_of(corpus.held_out)
    assert not train & held_out
    assert train | held_out == set(LINES)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_wanted_share_is_held_out(text: Path, share: float):
    corpus = load(text, held_out=share)
    found = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert found == pytest.approx(share, abs=0.005)


@settings(deadline=None)
@given(st.floats(0.01, 0.99), st.lists(st.integers(1, 50), min_size=800, max_size=1000))
def test_documents_stay_whole_and_their_share_is_held_out_at_any_point(share: float, lengths: list[int]):
    documents = [DocumentTokens(np.full(length, number)) for number, length in enumerate(lengths)]
    train, held_out = split_documents(documents, share, ByteTokenizer(), sum(lengths))
    held = {int(document.ids[0]) for document in held_out}
    whole = min(share, 1 - share) * sum(lengths) >= 4 * 50
    if whole:
        assert sorted(map(len, [*train, *held_out])) == sorted(lengths)
        seen = out = 0
        for number, length in enumerate(lengths):
            seen += length
            out += length if number in held else 0
            assert abs(out - share * seen) <= 50


def test_a_cut_that_leaves_nothing_on_one_side_adds_no_empty_document():
    documents = [DocumentTokens(np.ones(50)), *(DocumentTokens(np.ones(1)) for _ in range(799))]
    sides = split_documents(documents, 0.01, ByteTokenizer(), 849)
    assert all(len(document) for side in sides for document in side)


def test_a_document_with_a_mask_is_never_cut():
    long = DocumentTokens(np.ones(50), np.ones(51, dtype=bool))
    train, held_out = split_documents([long] * 20, 0.1, ByteTokenizer(), 1000)
    assert {len(document) for document in [*train, *held_out]} == {50}
    assert len(held_out) == 2


def test_a_text_too_long_to_be_held_out_is_cut_at_a_line_end_and_the_others_stay_whole(tmp_path: Path):
    long = "".join(LINES[:20_000])
    texts = [long, *(f"{number} short\n" for number in range(400))]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = load(tmp_path)
    train = bytes(corpus.train).decode().split("\0")
    held_out = bytes(corpus.held_out).decode().split("\0")
    assert train[0] + held_out[0] == long
    assert train[0].endswith("\n")
    assert sorted([*train[1:-1], *held_out[1:-1]]) == sorted(texts[1:])
    assert len(held_out) - 2 == pytest.approx(20, abs=1)


def test_the_split_is_the_same_every_time(text: Path):
    first, second = load(text), load(text)
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.held_out, second.held_out)


def test_the_end_token_stands_behind_every_document(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text('{"text": "one document, quite short"}\n' * 400)
    corpus = load(tmp_path, held_out=0.5, seq_len=4)
    assert int((corpus.train == 0).sum()) == int((corpus.held_out == 0).sum()) == 200
    assert corpus.train[-1] == corpus.held_out[-1] == 0


def test_text_that_is_too_short_is_refused_with_lengths_and_what_to_change(tmp_path: Path):
    (tmp_path / "short.txt").write_text("too short\n")
    with pytest.raises(UserError) as refused:
        load(tmp_path / "short.txt")
    message = str(refused.value)
    assert all(part in message for part in ("tokens", "data.seq_len = 256", "add text", "data.held_out = 0.05"))


@pytest.mark.parametrize("size", [20_000, 60_000])
def test_a_small_text_can_be_trained_on_with_the_defaults(size: int, tmp_path: Path):
    (tmp_path / "small.txt").write_text("".join(LINES)[:size])
    assert len(load(tmp_path / "small.txt").held_out) > 256


@pytest.mark.parametrize("held_out", [0.05, 0.99])
def test_the_sequence_length_advised_for_a_short_text_is_short_enough(held_out: float, tmp_path: Path):
    file = tmp_path / "short.txt"
    file.write_text("too short\n")
    with pytest.raises(UserError) as refused:
        load(file, held_out=held_out)
    advised = re.search(r"set data.seq_len below (\d+)", str(refused.value))
    if advised:
        load(file, held_out=held_out, seq_len=int(advised[1]) - 1)


def test_the_same_text_is_split_alike_wherever_it_lies_and_however_it_is_named(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "moved.txt").write_bytes(text.read_bytes())
    monkeypatch.chdir(tmp_path)
    here = load(text)
    for name in (tmp_path, tmp_path / "moved.txt", Path("moved.txt"), Path(".")):
        assert np.array_equal(load(name).held_out, here.held_out), name


def test_a_file_name_that_is_not_unicode_can_be_read(tmp_path: Path):
    (tmp_path / "caf\udce9.txt").write_text("".join(LINES[:9000]))
    assert len(load(tmp_path).train) > 100_000


def test_a_lone_surrogate_in_json_is_read_or_refused(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text('{"text": "a \\ud83d b"}\n' * 2000)
    try:
        load(tmp_path)
    except UserError as refused:
        assert "line 1" in str(refused)  # noqa: PT017


def test_what_cannot_be_read_is_left_out_on_request_and_listed(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a text of some length"}\n' * 900 + "bad\n")
    with pytest.raises(UserError, match=r"data\.files: .*line 901 is not JSON"):
        load(file, seq_len=4)
    data = DataConfig(source="files", files=(str(file),), seq_len=4, skip_bad=True)
    corpus = load_corpus(data, ByteTokenizer(), 256)
    assert ["line 901 is not JSON" in problem for problem in corpus.skipped] == [True]
    assert len(corpus.train_starts) + len(corpus.held_out_starts) == 900


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_the_size_needed(text: Path):
    data = DataConfig(source="files", files=(str(text),))
    with pytest.raises(UserError, match=r"model\.vocab = 200, .* 256 tokens; set model\.vocab to at least 256"):
        load_corpus(data, ByteTokenizer(), 200)
    assert load_corpus(data, ByteTokenizer(), 256)


def test_tokens_are_kept_in_the_smallest_type_that_holds_them(text: Path):
    assert load(text).train.dtype == np.uint8
    assert load(text).held_out.dtype == np.uint8


def test_a_zipf_stream_is_skewed_repeats_itself_and_has_something_to_learn():
    tokens = zipf_tokens(200_000, 256, seed=1)
    assert np.array_equal(tokens, zipf_tokens(200_000, 256, seed=1))
    assert not np.array_equal(tokens[:1000], zipf_tokens(1000, 256, seed=2))
    counts = np.bincount(tokens, minlength=256)
    assert counts.max() > 20 * np.median(counts)
    likeliest = [np.bincount(tokens[1:][tokens[:-1] == t]).max() / (tokens[:-1] == t).sum() for t in range(20)]
    assert min(likeliest) > 0.45, "half of all tokens follow from the one before"


def test_a_run_on_a_zipf_stream_has_train_and_held_out_tokens_that_fit_the_vocabulary():
    corpus = load_corpus(DataConfig(source="zipf", held_out=0.01), ByteTokenizer(), 256)
    assert corpus.train.max() < 256
    assert 0 < len(corpus.held_out) < len(corpus.train)


def test_documents_of_each_side_begin_where_they_are_said_to(tmp_path: Path):
    """Letters name documents."""
    lengths = [9000, 10, 1, 0, 300, 5000, 2048, 1, 20_000]
    texts = [chr(ord("a") + n % 26) * length for n, length in enumerate(lengths)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = load(tmp_path, held_out=0.3, seq_len=4)
    kept = ""
    for tokens, starts in ((corpus.train, corpus.train_starts), (corpus.held_out, corpus.held_out_starts)):
        parts = [bytes(part).decode() for part in np.split(tokens, starts[1:])]
        assert [text[-1] for text in parts] == ["\0"] * len(parts), "the end of a document belongs to it"
        assert all(len(set(text[:-1])) <= 1 for text in parts)
        kept += "".join(text[:-1] for text in parts)
    assert sorted(kept) == sorted("".join(texts))
