"""All documents as two long rows of token numbers, one to train on and one held out.

Documents are cut into pieces of a few thousand characters, and a hash of the piece's name decides on which side it
falls: the same text gives the same split everywhere, and every subject has its share on both sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from moefold.config.refused import Refused
from moefold.config.run import DataConfig
from moefold.data.documents import documents
from moefold.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    train: np.ndarray
    held_out: np.ndarray


def is_held_out(name: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < share * 2**32


def load_corpus(data: DataConfig, tokenizer: Tokenizer, vocab: int) -> Corpus:
    """Read, tokenize and split; refuse what is too short or does not fit the model."""
    if tokenizer.size > vocab:
        raise Refused(
            f"model.vocab = {vocab}, but data.tokenizer = {data.tokenizer} has {tokenizer.size} tokens; "
            f"set model.vocab to at least {tokenizer.size}"
        )
    dtype = np.uint8 if tokenizer.size <= 2**8 else np.uint16 if tokenizer.size <= 2**16 else np.uint32
    sides: dict[bool, list[np.ndarray]] = {True: [], False: []}
    end = np.array([tokenizer.end], dtype=dtype)
    for name, text in documents(data):
        for number, piece in enumerate(pieces(text)):
            sides[is_held_out(f"{name}#{number}", data.held_out)] += [tokenizer.encode(piece).astype(dtype)]
        sides[False].append(end)
    corpus = Corpus(*(np.concatenate(sides[side]) if sides[side] else np.empty(0, dtype) for side in (False, True)))
    for what, tokens in (("to train on", corpus.train), ("held out for validation", corpus.held_out)):
        if len(tokens) <= data.seq_len:
            raise Refused(
                f"the text gives {len(tokens)} tokens {what}; expected more than data.seq_len = {data.seq_len}; "
                f"add text, set data.seq_len below {max(len(tokens), 2)}, or change data.held_out = {data.held_out:g}"
            )
    return corpus


def pieces(text: str, size: int = 8192) -> list[str]:
    """The text in parts of about `size` characters that end at line ends where there are any."""
    parts, start = [], 0
    while start < len(text):
        end = start + size
        newline = text.rfind("\n", start, end) if end < len(text) else -1
        end = newline + 1 if newline > start else end
        parts.append(text[start:end])
        start = end
    return parts
