"""The corpus: all documents as two long arrays of token ids, one to train on and one held out.

Documents are cut into pieces of a few thousand characters, and evenly spaced pieces are held out. The same text gives
the same split on every machine, and every document has its share on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.documents import source_documents
from moefold.data.tokenizer import Tokenizer

ZIPF_LENGTH = 1 << 22  # tokens of the synthetic corpus
PIECE_CHARACTERS = 2048  # about this many are trained on or held out together


def single_document_start() -> np.ndarray:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Corpus:
    """Token ids of both sides, and the positions at which documents begin."""

    train: np.ndarray
    held_out: np.ndarray
    train_starts: np.ndarray = field(default_factory=single_document_start)
    held_out_starts: np.ndarray = field(default_factory=single_document_start)


class CorpusSide:
    """One side of the split, while it is being read."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        self.arrays: list[np.ndarray] = []
        self.length = 0
        self.document_ends: list[int] = []

    def append_tokens(self, tokens: np.ndarray) -> None:
        self.arrays.append(tokens.astype(self.dtype))
        self.length += len(tokens)

    def end_document(self) -> None:
        self.document_ends.append(self.length)

    def joined_tokens(self) -> np.ndarray:
        if not self.arrays:
            return np.empty(0, self.dtype)
        return np.concatenate(self.arrays)

    def document_starts(self) -> np.ndarray:
        """Where documents begin. A document may have no token on this side."""
        ends = np.array([0, *self.document_ends], dtype=np.int64)
        return np.unique(ends[:-1])


def load_corpus(data: DataConfig, tokenizer: Tokenizer, vocab: int) -> Corpus:
    """Read, tokenize and split the text. Refuses a text that is too short and a tokenizer that does not fit."""
    if tokenizer.size > vocab:
        raise UserError(
            f"model.vocab = {vocab}, but data.tokenizer = {data.tokenizer} has {tokenizer.size} tokens; "
            f"set model.vocab to at least {tokenizer.size}"
        )
    if data.source == "zipf":
        return zipf_corpus(data, tokenizer.size)
    corpus = read_corpus(data, tokenizer)
    refuse_short_corpus(data, corpus)
    return corpus


def zipf_corpus(data: DataConfig, vocab: int) -> Corpus:
    train = zipf_tokens(ZIPF_LENGTH, vocab, seed=1)
    held_out_length = int(ZIPF_LENGTH * data.held_out)
    held_out = zipf_tokens(held_out_length, vocab, seed=2)
    return Corpus(train, held_out)


def zipf_tokens(count: int, vocab: int, seed: int) -> np.ndarray:
    """Random tokens with Zipf's frequencies, half of them the fixed successor of the token before: learnable data for
    benchmarks, which unbalances a router."""
    shares = 1 / np.arange(1, vocab + 1)
    shares /= shares.sum()
    fixed = np.random.Generator(np.random.PCG64(0))  # the same successors for every seed
    successor = fixed.choice(vocab, size=vocab, p=shares)
    generator = np.random.Generator(np.random.PCG64(seed))
    tokens = generator.choice(vocab, size=count, p=shares)
    follows = generator.random(count) < 0.5
    follows[0] = False
    # Distance of each token from the last one that was drawn; successors are filled in by that distance.
    positions = np.arange(count)
    drawn = np.where(follows, 0, positions)
    last_drawn = np.maximum.accumulate(drawn)
    distance = positions - last_drawn
    longest = int(distance.max())
    for step in range(1, longest + 1):
        here = np.flatnonzero(distance == step)
        tokens[here] = successor[tokens[here - 1]]
    return tokens.astype(np.uint32)


def smallest_dtype(vocab: int) -> np.dtype:
    if vocab <= 2**8:
        return np.dtype(np.uint8)
    if vocab <= 2**16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def read_corpus(data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    dtype = smallest_dtype(tokenizer.size)
    train = CorpusSide(dtype)
    held_out = CorpusSide(dtype)
    end = np.array([tokenizer.end])
    number = 0
    for text in source_documents(data):
        for piece in split_at_line_ends(text):
            side = held_out if is_held_out(number, data.held_out) else train
            tokens = tokenizer.encode(piece)
            side.append_tokens(tokens)
            number += 1
        # The end token goes to the training side, also of a document that ends in a held-out piece.
        train.append_tokens(end)
        train.end_document()
        held_out.end_document()
    return Corpus(
        train=train.joined_tokens(),
        held_out=held_out.joined_tokens(),
        train_starts=train.document_starts(),
        held_out_starts=held_out.document_starts(),
    )


def is_held_out(number: int, share: float) -> bool:
    """Whether piece `number` is one of the evenly spaced ones that make up the share."""
    before = int(number * share + 0.5)
    after = int((number + 1) * share + 0.5)
    return after > before


def refuse_short_corpus(data: DataConfig, corpus: Corpus) -> None:
    """Refuse a side that is not longer than a sequence."""
    shortest = min(len(corpus.train), len(corpus.held_out))
    shorter = f"set data.seq_len below {shortest}, " if shortest > 1 else ""
    sides = {"to train on": corpus.train, "held out for validation": corpus.held_out}
    for purpose, tokens in sides.items():
        if len(tokens) <= data.seq_len:
            raise UserError(
                f"the text gives {len(tokens)} tokens {purpose}; expected more than data.seq_len = {data.seq_len}; "
                f"add text, {shorter}or change data.held_out = {data.held_out:g}"
            )


def split_at_line_ends(text: str, size: int = PIECE_CHARACTERS) -> list[str]:
    """The text in pieces of about `size` characters, cut at line ends where there are any."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            newline = text.rfind("\n", start, end)
            if newline > start:
                end = newline + 1
        pieces.append(text[start:end])
        start = end
    return pieces
