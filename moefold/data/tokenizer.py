"""Text to token numbers and back: bytes as they are, or a Hugging Face tokenizer.json. The one file that touches
the `tokenizers` library."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from moefold.config.errors import UserError, printable_text


class Tokenizer(Protocol):
    size: int
    end: int  # the token put behind every document

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes. NUL, which no text holds, ends a document."""

    size, end = 256, 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if 0 < t < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, with its end-of-text token as document end."""

    ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

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
        except Exception as error:  # the library raises plain Exception for whatever it cannot read
            raise UserError(f"data.tokenizer = {path} is not a tokenizer.json: {str(error)[:200]}") from None
        self.size = self.engine.get_vocab_size()
        known = (self.engine.token_to_id(name) for name in self.ENDS)
        self.end = next((token for token in known if token is not None), 0)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self.engine.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

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
