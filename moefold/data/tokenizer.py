"""Tokenizers: UTF-8 bytes, the packaged vocabulary of Python's standard library, or a Hugging Face tokenizer.json, such
as the one that a run trains on its own text (data/trained_vocabulary.py).

`python -m tests.support.stdlib_tokenizer` makes the packaged vocabulary: byte pairs, 32,000 entries, each merge behind
those before it. So its first N entries are a vocabulary of N entries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from moefold.config.bounded_files import read_bounded_file
from moefold.config.errors import UserError, printable_text
from moefold.config.run import TRAINED, DataConfig
from moefold.data.tokenizer_engine import cut_vocabulary, open_engine

STDLIB_TOKENIZER = Path(__file__).parent / "stdlib_tokenizer" / "tokenizer.json"
STDLIB_ENTRIES = 32_000  # the smallest vocabulary of a published preset
LARGEST_BYTE_VOCAB = 1000  # above, bytes leave most of a vocabulary unused
LEGAL_NAMES = "auto, byte, stdlib, trained or the path of a tokenizer.json"


class EndToken(NamedTuple):
    """The end-of-document token, appended to every document. `origin` is where it was found."""

    id: int
    text: str
    origin: str

    def __str__(self) -> str:
        return f"{self.text} (id {self.id}, {self.origin})"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    size: int  # one more than the highest id
    end: EndToken

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: list[int]) -> str: ...

    def show(self, tokens: list[int]) -> str:
        """The text with special tokens."""
        ...


class ByteTokenizer:
    """UTF-8 bytes. NUL, which does not occur in text, is the end-of-document token."""

    size = 256
    end = EndToken(0, "NUL", "no byte of a text")

    def encode(self, text: str) -> np.ndarray:
        raw = text.encode("utf-8")
        return np.frombuffer(raw, dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        raw = bytes(token for token in tokens if 0 < token < 256)
        return raw.decode("utf-8", errors="replace")

    def show(self, tokens: list[int]) -> str:
        return self.decode(tokens)


class EncodedText(NamedTuple):
    """Token ids, and for each the characters of the text from which it was made: first, and behind the last."""

    ids: np.ndarray
    offsets: np.ndarray


class HuggingFaceTokenizer:
    """A tokenizer.json, in `folder`. `end_token` names the token that ends a document; empty: that of the files
    there."""

    def __init__(self, engine: Any, folder: Path, end_token: str = ""):
        self.engine = engine
        self.folder = folder
        ids = engine.get_vocab(with_added_tokens=True).values()
        self.size = max(ids, default=-1) + 1  # ids may leave gaps, so their number may be smaller
        if end_token:
            self.end = self.named_end_token(end_token)
        else:
            self.end = self.find_end_token(folder)

    def named_end_token(self, text: str) -> EndToken:
        token = self.engine.token_to_id(text)
        if token is None:
            raise UserError(
                f"data.end_token = {printable_text(text)} is no token of data.tokenizer; expected one of its tokens"
            )
        return EndToken(token, text, "data.end_token")

    def find_end_token(self, folder: Path) -> EndToken:
        """What the files beside the tokenizer call its end token; without them, a token with a usual name."""
        for name, key in END_TOKEN_KEYS.items():
            stated = stated_end_token(folder / name, key)
            text = self.engine.id_to_token(stated) if isinstance(stated, int) else stated
            token = None if text is None else self.engine.token_to_id(text)
            if token is not None and text is not None:
                return EndToken(token, text, name)
        for text in USUAL_END_TOKENS:
            token = self.engine.token_to_id(text)
            if token is not None:
                return EndToken(token, text, "by its name")
        files = ", ".join(END_TOKEN_KEYS)
        raise UserError(
            f"data.tokenizer: no end-of-document token: none of {files} beside it names one, and it has none of "
            f"{', '.join(USUAL_END_TOKENS)}; set data.end_token to one of its tokens"
        )

    def encode(self, text: str) -> np.ndarray:
        encoding = self.engine.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def encode_whole(self, text: str) -> np.ndarray:
        """With the special tokens that the tokenizer puts around a text."""
        encoding = self.engine.encode(text)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def encode_with_offsets(self, text: str) -> EncodedText:
        encoding = self.engine.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.uint32)
        offsets = np.asarray(encoding.offsets, dtype=np.int64)
        return EncodedText(ids, offsets.reshape(-1, 2))

    def decode(self, tokens: list[int]) -> str:
        return self.engine.decode(tokens)

    def show(self, tokens: list[int]) -> str:
        return self.engine.decode(tokens, skip_special_tokens=False)


END_TOKEN_KEYS = {  # files beside a tokenizer.json, the first that names a token counts
    "tokenizer_config.json": "eos_token",
    "generation_config.json": "eos_token_id",
    "config.json": "eos_token_id",
}
USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


def stated_end_token(path: Path, key: str) -> int | str | None:
    """The id or text of the end token in a JSON file, if the file exists and states one."""
    return stated_token(read_token_options(path), key)


def stated_token(options: dict[str, Any], key: str) -> int | str | None:
    """The id or text of a special token; of a list, the first."""
    stated = options.get(key)
    if isinstance(stated, list) and stated:
        stated = stated[0]
    if isinstance(stated, dict):  # a token with its options
        stated = stated.get("content")
    if isinstance(stated, bool) or not isinstance(stated, int | str):
        return None
    return stated


def read_token_options(path: Path) -> dict[str, Any]:
    """The content of a JSON file beside a tokenizer; nothing where there is no such file or it holds no object."""
    if not path.is_file():
        return {}
    try:
        options = json.loads(read_bounded_file(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({str(error)[:100]}); mend it, or set data.end_token") from None
    return options if isinstance(options, dict) else {}


def choose_tokenizer(data: DataConfig, vocab: int) -> str:
    """`data.tokenizer`; auto means the packaged vocabulary for the standard library's text and a model whose vocabulary
    is larger than bytes need, else bytes."""
    if data.tokenizer != "auto":
        return data.tokenizer
    if data.source == "stdlib" and vocab > LARGEST_BYTE_VOCAB:
        return "stdlib"
    return "byte"


def load_tokenizer(name: str, vocab: int, end_token: str = "") -> Tokenizer:
    """A tokenizer by its name or path. The packaged vocabulary is cut to the first `vocab` entries."""
    if name == "byte":
        return ByteTokenizer()
    if name == "stdlib":
        packaged = STDLIB_TOKENIZER.read_text(encoding="utf-8")
        engine = open_engine(name, cut_vocabulary(packaged, vocab))
        return HuggingFaceTokenizer(engine, STDLIB_TOKENIZER.parent, end_token)
    if name == TRAINED:
        raise UserError(
            "data.tokenizer = trained is a vocabulary that moefold train trains at the start of a run; "
            "here set data.tokenizer to the tokenizer.json in the folder of such a run"
        )
    try:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"data.tokenizer = {path}: no such file; expected {LEGAL_NAMES}")
        text = read_bounded_file(path).decode("utf-8", errors="replace")
        engine = open_engine(name, text)
        return HuggingFaceTokenizer(engine, path.parent, end_token)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"data.tokenizer = {printable_text(name)} is no usable path ({error}); expected {LEGAL_NAMES}"
        ) from None
