"""Engines of the `tokenizers` library: read from a tokenizer.json, or trained on text. Only this file uses it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from moefold.config.errors import UserError

LONGEST_TOKEN = 16  # characters: long lines of one file are no words
# Words with the space before them, numbers of up to three digits, runs of signs, indentation apart from what follows.
PIECES = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|\s+"


def import_library(name: str) -> ModuleType:
    """The library, or a refusal of `data.tokenizer = name`."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            f"data.tokenizer = {name} needs the tokenizers library, which is not installed; "
            "run pip install 'moefold[hf]', or set data.tokenizer to byte, which alone does without it"
        ) from None
    return tokenizers


def open_engine(name: str, text: str) -> Any:
    """The tokenizer that the text of a tokenizer.json describes."""
    library = import_library(name)
    try:
        return library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for any text that it cannot read
        raise UserError(f"data.tokenizer = {name} is not a tokenizer.json: {str(error)[:200]}") from None


def train_byte_pairs(texts: Iterable[str], entries: int, end_token: str) -> str:
    """A tokenizer.json of byte pairs. Ids: 0 is the end token, 1 to 256 are bytes, and every further id is the next
    best merge; fewer than `entries` where no two tokens of the texts are left to merge."""
    library = import_library("trained")
    byte_level = library.pre_tokenizers.ByteLevel
    engine = library.Tokenizer(library.models.BPE())
    split = library.pre_tokenizers.Split(library.Regex(PIECES), "isolated")
    to_bytes = byte_level(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = library.pre_tokenizers.Sequence([split, to_bytes])
    engine.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[end_token],
        initial_alphabet=byte_level.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return compact_json(engine.to_str())


def compact_json(text: str) -> str:
    """A tokenizer.json without spaces, each merge as one text: half the size."""
    tree: dict[str, Any] = json.loads(text)
    model = tree["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    model["vocab"] = dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + "\n"


def cut_vocabulary(text: str, size: int) -> str:
    """A byte-pair tokenizer.json with its first `size` entries. Ids behind those of bytes are merges, in order."""
    tree = json.loads(text)
    model = tree["model"]
    vocabulary = model["vocab"]
    merges = model["merges"]
    surplus = max(0, len(vocabulary) - size)
    entries = vocabulary.items()
    model["vocab"] = {token: number for token, number in entries if number < size}
    model["merges"] = merges[: len(merges) - surplus]
    return json.dumps(tree)
