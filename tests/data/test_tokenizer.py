"""Text to numbers and back."""

import json
import platform
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import load_corpus
from moefold.data.documents import stdlib_documents
from moefold.data.tokenizer import (
    LARGEST_BYTE_VOCAB,
    STDLIB_ENTRIES,
    STDLIB_TOKENIZER,
    ByteTokenizer,
    HuggingFaceTokenizer,
    choose_tokenizer,
    load_tokenizer,
)
from moefold.presets.zoo import PRESETS
from tests.support.runs import SMALL, command

VOCAB = 100_000
unicode = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))


@settings(deadline=None)
@given(unicode)
def test_bytes_give_the_text_back(text: str):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint8
    assert tokenizer.end.id not in tokens
    assert tokenizer.decode(tokens.tolist()) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000)))
def test_any_tokens_can_be_shown_whatever_a_model_says(tokens: list[int]):
    assert "\x00" not in ByteTokenizer().decode(tokens)


def train_tokenizer(folder: Path, specials: list[str]) -> Path:
    """A byte-level BPE of 300 tokens, as Hugging Face writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    engine.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)  # pyright: ignore
    engine.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 50, trainer)
    path = folder / "tokenizer.json"
    engine.save(str(path))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("bpe"), ["<pad>", "<|endoftext|>"])


def test_byte_is_the_byte_tokenizer_and_a_path_a_hugging_face_one(bpe: Path):
    assert isinstance(load_tokenizer("byte", VOCAB), ByteTokenizer)
    assert isinstance(load_tokenizer(str(bpe), VOCAB), HuggingFaceTokenizer)


def test_a_hugging_face_tokenizer_gives_the_text_back_in_fewer_tokens(bpe: Path):
    tokenizer = load_tokenizer(str(bpe), VOCAB)
    for text in ("the quick brown fox", " été 🐍\n\ttabs\n", ""):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens.tolist()) == text
        assert all(token < tokenizer.size for token in tokens)
    assert len(tokenizer.encode("the quick brown fox")) < len("the quick brown fox")


EOS_FILES = {
    "tokenizer_config.json": {"eos_token": "<a>"},
    "generation_config.json": {"eos_token_id": 2},
    "config.json": {"eos_token_id": 3},
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (EOS_FILES, "<a> (id 1, tokenizer_config.json)"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<b>"}}}, "<b> (id 2, tokenizer_config.json)"),
        ({**EOS_FILES, "tokenizer_config.json": {"eos_token": None}}, "<b> (id 2, generation_config.json)"),
        ({"generation_config.json": {"eos_token_id": [3, 1]}}, "<c> (id 3, generation_config.json)"),
        ({"tokenizer_config.json": [], "config.json": {"eos_token_id": 3}}, "<c> (id 3, config.json)"),
        ({"config.json": {"eos_token_id": 99_999}}, "</s> (id 0, by its name)"),  # no such token
        ({"config.json": {"eos_token_id": True}}, "</s> (id 0, by its name)"),
        ({}, "</s> (id 0, by its name)"),
    ],
)
def test_the_end_token_is_the_one_that_the_tokenizers_own_files_name(files: dict, expected: str, tmp_path: Path):
    path = train_tokenizer(tmp_path, ["</s>", "<a>", "<b>", "<c>"])
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert str(load_tokenizer(str(path), VOCAB).end) == expected
    assert str(load_tokenizer(str(path), VOCAB, "<c>").end) == "<c> (id 3, data.end_token)"


def test_without_an_end_token_a_tokenizer_is_refused_and_never_ends_documents_with_token_0(tmp_path: Path):
    path = train_tokenizer(tmp_path, ["[UNK]"])
    with pytest.raises(UserError, match=r"no end-of-document token: .*tokenizer_config\.json.*set data\.end_token"):
        load_tokenizer(str(path), VOCAB)
    with pytest.raises(UserError, match=r"data\.end_token = <none> is no token"):
        load_tokenizer(str(path), VOCAB, "<none>")
    assert load_tokenizer(str(path), VOCAB, "[UNK]").end.id == 0
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        load_tokenizer(str(path), VOCAB)


def test_ids_of_a_vocabulary_with_gaps_are_stored_as_they_are(tmp_path: Path):
    """Three tokens, the highest of them 70,000: their number says nothing of their size."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    engine = Tokenizer(models.WordLevel({"a": 0, "b": 300, "</s>": 70_000}, unk_token="a"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    path = tmp_path / "tokenizer.json"
    engine.save(str(path))
    (tmp_path / "x.txt").write_text("a b\n" * 4000)
    data = DataConfig(source="files", files=(str(tmp_path / "x.txt"),), tokenizer=str(path))
    tokenizer = load_tokenizer(str(path), VOCAB)
    assert tokenizer.size == 70_001
    corpus = load_corpus(data, tokenizer, 70_001)
    assert set(corpus.train.tolist()) == {0, 300, 70_000}
    with pytest.raises(UserError, match=r"set model\.vocab to at least 70001"):
        load_corpus(data, tokenizer, 70_000)


def test_a_long_document_has_the_tokens_of_the_whole_text_wherever_it_is_cut(tmp_path: Path):
    """Merges across line ends and a space put before the text: pieces would give other tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.normalizer = normalizers.Prepend("_")  # pyright: ignore
    engine.pre_tokenizer = pre_tokenizers.Split("\x01", "removed")  # pyright: ignore
    engine.train_from_iterator(["end\nof line\n" * 40], trainers.BpeTrainer(vocab_size=60, special_tokens=["</s>"]))  # pyright: ignore
    path = tmp_path / "tokenizer.json"
    engine.save(str(path))
    text = "end\nof line\n" * 3000
    (tmp_path / "x.txt").write_text(text)
    tokenizer = load_tokenizer(str(path), VOCAB)
    data = DataConfig(source="files", files=(str(tmp_path / "x.txt"),), tokenizer=str(path), seq_len=8)
    corpus = load_corpus(data, tokenizer, tokenizer.size)
    both = [*corpus.train[:-1], *corpus.held_out[:-1]]
    assert both == tokenizer.encode(text).tolist()


def test_a_corpus_of_hugging_face_tokens_fits_the_vocabulary_or_is_refused(bpe: Path, tmp_path: Path):
    (tmp_path / "x.txt").write_text("the quick brown fox jumps\n" * 20_000)
    data = DataConfig(source="files", files=(str(tmp_path / "x.txt"),), tokenizer=str(bpe))
    tokenizer = load_tokenizer(str(bpe), VOCAB)
    corpus = load_corpus(data, tokenizer, tokenizer.size)
    assert corpus.train.dtype == np.uint16
    assert corpus.train.max() < tokenizer.size
    assert corpus.train[-1] == tokenizer.end.id
    with pytest.raises(UserError, match=rf"model\.vocab = 256.*set model\.vocab to at least {tokenizer.size}"):
        load_corpus(data, tokenizer, 256)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b'{"version": "1.0"}', b"\xff\xfe", b"\x00"])
def test_a_broken_tokenizer_file_is_refused_by_name(content: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.tokenizer = .*tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(str(path), VOCAB)


@pytest.mark.parametrize("name", ["", "bytes", "/nowhere/tokenizer.json", "/tmp"])
def test_a_tokenizer_that_is_no_file_is_refused_with_what_was_expected(name: str):
    with pytest.raises(
        UserError, match=r"data\.tokenizer = .*expected auto, byte, stdlib, trained or the path of a tokenizer\.json"
    ):
        load_tokenizer(name, VOCAB)


# ---- the packaged vocabulary of Python's standard library


def test_the_standard_library_is_read_with_its_own_vocabulary_where_bytes_would_leave_most_of_it_unused():
    for name, make in PRESETS.items():
        config = make()
        expected = "stdlib" if config.model.vocab > LARGEST_BYTE_VOCAB else "byte"
        if config.data.tokenizer != "auto":
            continue
        assert choose_tokenizer(config.data, config.model.vocab) == expected, name
        tokenizer = load_tokenizer(expected, config.model.vocab)
        assert tokenizer.size <= config.model.vocab, name
    assert choose_tokenizer(DataConfig(source="files"), 50_304) == "byte"
    assert choose_tokenizer(DataConfig(source="zipf"), 50_304) == "byte"
    assert choose_tokenizer(DataConfig(tokenizer="byte"), 50_304) == "byte"


@pytest.mark.parametrize("vocab", [1001, 5000, STDLIB_ENTRIES, 50_304])
def test_the_vocabulary_is_cut_to_the_models_and_gives_texts_back_in_fewer_tokens(vocab: int):
    tokenizer = load_tokenizer("stdlib", vocab)
    assert tokenizer.size == min(vocab, STDLIB_ENTRIES)
    assert str(tokenizer.end) == "<|endoftext|> (id 0, tokenizer_config.json)"
    texts = ["def f(x):\n    return x\n", " été 🐍\n\ttabs\n\n\n", "", *islice(stdlib_documents(), 5)]
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens.tolist()) == text
        assert tokenizer.end.id not in tokens
        assert all(token < vocab for token in tokens)
    assert len(tokenizer.encode(texts[-1])) < 0.6 * len(texts[-1])


def test_the_file_is_small_and_travels_with_the_package():
    assert STDLIB_TOKENIZER.stat().st_size < 2 << 20
    root = Path(__file__).parents[2]
    assert STDLIB_TOKENIZER.is_relative_to(root / "moefold")
    ignored = (root / ".gitignore").read_text().split()
    assert not {"*.json", "data/", "moefold/data/"} & set(ignored), "a wheel has all files that git does not ignore"


@pytest.mark.extended
@pytest.mark.slow
def test_the_file_can_be_made_again_to_the_byte():
    import tokenizers

    from tests.support.stdlib_tokenizer import MADE_WITH, train_stdlib_vocabulary

    if (platform.python_version(), tokenizers.__version__, platform.machine()) != MADE_WITH:
        pytest.skip(f"made with {MADE_WITH}: another standard library has another vocabulary")
    is_same = train_stdlib_vocabulary() == STDLIB_TOKENIZER.read_text(encoding="utf-8")
    assert is_same, "another vocabulary"  # texts too long to be compared line by line


@pytest.mark.extended
@pytest.mark.slow
def test_a_run_with_a_large_vocabulary_trains_on_it_without_being_asked(tmp_path: Path):
    argv = ["train", "tiny", *SMALL, "--model.vocab", "4000", "--train.steps", "1", "--out", str(tmp_path / "run")]
    code, output = command(argv, tmp_path / "log")
    assert code == 0, output
    assert "documents end with <|endoftext|>" in output
    assert "warning" not in output
    assert "tokenizer: stdlib" in (tmp_path / "run" / "config.yaml").read_text()
