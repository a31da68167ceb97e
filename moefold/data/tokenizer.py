"""Tokenizers: UTF-8 bytes, or a Hugging Face tokenizer.json. Only this file uses the `tokenizers` library."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from moefold.config.errors import UserError, printable_text


class Tokenizer(Protocol):
    """Text to token ids and back."""

    size: int  # of the vocabulary
    end: int  # end-of-document token, appended to every document

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes. NUL, which does not occur in text, is the end-of-document token."""

    size, end = 256, 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        raw = bytes(token for token in tokens if 0 < token < 256)
        return raw.decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json. Its end-of-text token, the first of END_TOKENS that it has, ends a document."""

    END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer as Engine
        except ImportError:
            raise UserError(
                f"data.tokenizer = {path} needs the tokenizers library, which is not installed; "
                "run pip install 'moefold[hf]', or set data.tokenizer to byte"
            ) from None
        if not path.is_file():
            raise UserError(f"data.tokenizer = {path}: no such file; expected byte or the path of a tokenizer.json")
        try:
            self.engine = Engine.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for any file that it cannot read
            raise UserError(f"data.tokenizer = {path} is not a tokenizer.json: {str(error)[:200]}") from None
        self.size = self.engine.get_vocab_size()
        self.end = self.find_end_token()

    def find_end_token(self) -> int:
        for name in self.END_TOKENS:
            token = self.engine.token_to_id(name)
            if token is not None:
                return token
        return 0

    def encode(self, text: str) -> np.ndarray:
        encoding = self.engine.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return self.engine.decode(tokens)


def load_tokenizer(name: str) -> Tokenizer:
    if name == "byte":
        return ByteTokenizer()
    try:
        return HuggingFaceTokenizer(Path(name).expanduser())
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"data.tokenizer = {printable_text(name)} is no usable path ({error}); expected byte or a tokenizer.json"
        ) from None
