"""Prepared folders: shards of tokens, their index, and the tokenizer that made them. Torch-free; nothing is unpickled.

DIR/index.json             what follows, with the sha256 of its own content
DIR/tokenizer.json, tokenizer_config.json    the tokenizer, unless tokens are bytes
DIR/train/, DIR/held_out/  shards of both sides (data/shards.py)
DIR/skipped.txt            what could not be read, a line each, where data.skip_bad was set
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.config.errors import UserError
from moefold.data.shards import ShardFacts, write_durably
from moefold.data.tokenizer import HuggingFaceTokenizer, Tokenizer

FORMAT, VERSION, MASKED_VERSION = "moefold-tokens", 1, 2  # a folder with masks is of a version of its own
INDEX_NAME = "index.json"
SIDES = ("train", "held_out")


@dataclass(frozen=True)
class PreparedIndex:
    """The content of index.json. `plan`: digest of sources and settings; `vocabulary`: digest of the tokenizer;
    `has_masks`: shards have masks of trained tokens."""

    plan: str
    vocabulary: str
    vocab_size: int
    end: int
    held_out: float
    dtype: str
    sources: tuple[str, ...]
    skipped: int
    shards: dict[str, tuple[ShardFacts, ...]]  # by side
    has_masks: bool = False

    def tokens(self, side: str) -> int:
        counts = [facts.tokens for facts in self.shards[side]]
        return sum(counts)

    def documents(self, side: str) -> int:
        counts = [facts.documents for facts in self.shards[side]]
        return sum(counts)

    @property
    def token_type(self) -> np.dtype:
        return np.dtype(self.dtype)

    @property
    def digest(self) -> str:
        """Digest of the tokens: that of all shards."""
        shards = json.dumps(self.shards)
        return hashlib.sha256(shards.encode()).hexdigest()


def write_index(folder: Path, index: PreparedIndex) -> None:
    version = MASKED_VERSION if index.has_masks else VERSION
    content: dict[str, Any] = {"format": FORMAT, "version": version}
    content |= asdict(index)
    del content["has_masks"]
    content["sha256"] = content_digest(content)
    text = json.dumps(content)
    write_durably(folder / INDEX_NAME, text.encode())


def content_digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_index(folder: Path) -> PreparedIndex:
    path = folder / INDEX_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stated = content.pop("sha256")
        same = stated == content_digest(content)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no prepared data ({error}); expected a folder that moefold data prepare wrote to its end"
        ) from None
    except (KeyError, AttributeError, TypeError):
        same = False
        content = {}
    if not same:
        raise UserError(f"{path} differs from what was written (sha256); copy it again, or prepare the data again")
    kind = content.pop("format")
    version = content.pop("version")
    if kind != FORMAT or version not in (VERSION, MASKED_VERSION):
        legal = f"{VERSION} or {MASKED_VERSION}"
        raise UserError(f"{path} is {kind} of version {version}; expected {FORMAT} of version {legal}")
    sides: dict[str, tuple[ShardFacts, ...]] = {}
    for side, listed in content["shards"].items():
        shards = [ShardFacts(*facts) for facts in listed]
        sides[side] = tuple(shards)
    content["sources"] = tuple(content["sources"])
    content["shards"] = sides
    content["has_masks"] = version == MASKED_VERSION
    return PreparedIndex(**content)


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """A digest of the token ids and the end token: equal for tokenizers whose ids mean the same."""
    tokens: Any = "bytes"
    if isinstance(tokenizer, HuggingFaceTokenizer):
        vocabulary = tokenizer.engine.get_vocab(with_added_tokens=True)
        tokens = sorted(vocabulary.items())
    end = tokenizer.end.id
    text = json.dumps([tokens, end])
    return hashlib.sha256(text.encode()).hexdigest()


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer beside its tokens, so that the folder needs no other file. Bytes need none."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        text = tokenizer.engine.to_str()
        stated = {"eos_token": tokenizer.end.text}
        options = json.dumps(stated)
        write_durably(folder / "tokenizer.json", text.encode())
        write_durably(folder / "tokenizer_config.json", options.encode())


def saved_tokenizer(folder: Path) -> str:
    """The name of the tokenizer of a prepared folder, as `data.tokenizer` has it."""
    path = folder / "tokenizer.json"
    return str(path) if path.is_file() else "byte"
