"""Text to numbers and back."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import load_corpus
from moefold.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer

unicode = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))


@settings(deadline=None)
@given(unicode)
def test_bytes_give_the_text_back(text: str):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint8
    assert tokenizer.end not in tokens
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
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)
    assert isinstance(load_tokenizer(str(bpe)), HuggingFaceTokenizer)


def test_a_hugging_face_tokenizer_gives_the_text_back_in_fewer_tokens(bpe: Path):
    tokenizer = load_tokenizer(str(bpe))
    for text in ("the quick brown fox", " été 🐍\n\ttabs\n", ""):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens.tolist()) == text
        assert all(token < tokenizer.size for token in tokens)
    assert len(tokenizer.encode("the quick brown fox")) < len("the quick brown fox")


def test_the_end_of_text_token_ends_documents_and_zero_does_where_there_is_none(bpe: Path, tmp_path: Path):
    assert load_tokenizer(str(bpe)).end == 1
    assert load_tokenizer(str(train_tokenizer(tmp_path, ["[UNK]"]))).end == 0


def test_a_corpus_of_hugging_face_tokens_fits_the_vocabulary_or_is_refused(bpe: Path, tmp_path: Path):
    (tmp_path / "x.txt").write_text("the quick brown fox jumps\n" * 20_000)
    data = DataConfig(source="files", files=(str(tmp_path / "x.txt"),), tokenizer=str(bpe))
    tokenizer = load_tokenizer(str(bpe))
    corpus = load_corpus(data, tokenizer, tokenizer.size)
    assert corpus.train.dtype == np.uint16
    assert corpus.train.max() < tokenizer.size
    assert corpus.train[-1] == tokenizer.end
    with pytest.raises(UserError, match=rf"model\.vocab = 256.*set model\.vocab to at least {tokenizer.size}"):
        load_corpus(data, tokenizer, 256)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b'{"version": "1.0"}', b"\xff\xfe", b"\x00"])
def test_a_broken_tokenizer_file_is_refused_by_name(content: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.tokenizer = .*tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["", "bytes", "/nowhere/tokenizer.json", "/tmp"])
def test_a_tokenizer_that_is_no_file_is_refused_with_what_was_expected(name: str):
    with pytest.raises(UserError, match=r"data\.tokenizer = .*expected byte or the path of a tokenizer\.json"):
        load_tokenizer(name)
