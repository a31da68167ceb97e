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

from moefold.config.errors import UserError, printable_text
from moefold.data.shards import ShardFacts, write_durably
from moefold.data.tokenizer import HuggingFaceTokenizer, Tokenizer

FORMAT = "moefold-tokens"
VERSIONS = {"text": 1, "samples": 2, "preferences": 3}  # by what a folder holds: a reader of texts must refuse masks
INDEX_NAME = "index.json"
LARGEST_COUNT = 1 << 48
TOKEN_DTYPES = ("|u1", "<u2", "<u4")  # as numpy writes them
PLAIN_KINDS = {"plan": str, "vocabulary": str, "vocab_size": int, "end": int, "held_out": float, "skipped": int}
SIDES = ("train", "held_out")


@dataclass(frozen=True)
class PreparedIndex:
    """The content of index.json. `plan`: digest of sources and settings; `vocabulary`: digest of the tokenizer;
    `holds`: texts, samples with masks of trained tokens, or preferences, which have masks too."""

    plan: str
    vocabulary: str
    vocab_size: int
    end: int
    held_out: float
    dtype: str
    sources: tuple[str, ...]
    skipped: int
    shards: dict[str, tuple[ShardFacts, ...]]  # by side
    holds: str = "text"

    @property
    def has_masks(self) -> bool:
        return self.holds != "text"

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
    content: dict[str, Any] = {"format": FORMAT, "version": VERSIONS[index.holds]}
    content |= asdict(index)
    del content["holds"]
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
    kind = content.pop("format", None)
    version = content.pop("version", None)
    held = [holds for holds, known in VERSIONS.items() if version == known]
    if kind != FORMAT or not held:
        legal = " or ".join(map(str, VERSIONS.values()))
        found = printable_text(f"{kind} of version {version}")
        raise UserError(f"{path} is {found}; expected {FORMAT} of version {legal}")
    try:
        return parse_index(content, held[0])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reason = printable_text(repr(error))
        raise UserError(f"{path} is no index of prepared data ({reason}); prepare the data again") from None


def parse_index(content: dict[str, Any], holds: str) -> PreparedIndex:
    """The index that an object of JSON describes; what Python raises for other objects, where it is none."""
    sides: dict[str, tuple[ShardFacts, ...]] = {}
    for side in SIDES:
        shards = [ShardFacts(*facts) for facts in content["shards"][side]]
        for facts in shards:
            require_sound_facts(facts)
        sides[side] = tuple(shards)
    for name, kind in PLAIN_KINDS.items():
        if type(content[name]) is not kind:
            raise ValueError(f"{name} = {content[name]!r:.50}")
    if content["dtype"] not in TOKEN_DTYPES:
        raise ValueError(f"dtype = {content['dtype']!r:.50}")
    sources = tuple(map(str, content["sources"]))
    read = {**content, "sources": sources, "shards": sides, "holds": holds}
    return PreparedIndex(**read)


def require_sound_facts(facts: ShardFacts) -> None:
    """Refuse facts that no shard can have, such as a name that leaves the folder."""
    numbers = (facts.documents, facts.tokens, facts.crc32)
    legal = all(type(number) is int and 0 <= number < LARGEST_COUNT for number in numbers)
    is_name = isinstance(facts.name, str) and facts.name.isprintable() and Path(facts.name).name == facts.name
    if not legal or not is_name:
        raise ValueError(f"a shard {tuple(facts)!r:.200}")


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
