"""All documents as two long rows of token numbers, one to train on and one held out.

Documents are cut into pieces of a few thousand characters, and every so many-th piece is held out: the same text gives
the same split everywhere, wherever its files lie, and every subject has its share on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.documents import source_documents
from moefold.data.tokenizer import Tokenizer


def single_document_start() -> np.ndarray:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Corpus:
    """Two rows of tokens, and where in each a document begins."""

    train: np.ndarray
    held_out: np.ndarray
    train_starts: np.ndarray = field(default_factory=single_document_start)
    held_out_starts: np.ndarray = field(default_factory=single_document_start)


ZIPF_LENGTH = 1 << 22  # tokens of a stream that has no end of its own


def zipf_tokens(count: int, size: int, seed: int) -> np.ndarray:
    """Random tokens, the n-th most frequent about 1 / n as frequent as the first, half of them the fixed successor of
    the one before: something to learn, for benchmarks, that unbalances a router."""
    shares = 1 / np.arange(1, size + 1)
    shares /= shares.sum()
    after = np.random.Generator(np.random.PCG64(0)).choice(size, size=size, p=shares)  # the same in every stream
    generator = np.random.Generator(np.random.PCG64(seed))
    tokens = generator.choice(size, size=count, p=shares)
    follows = generator.random(count) < 0.5
    follows[0] = False
    since = np.arange(count) - np.maximum.accumulate(np.where(follows, 0, np.arange(count)))  # the last one drawn
    for distance in range(1, int(since.max()) + 1):
        here = np.flatnonzero(since == distance)
        tokens[here] = after[tokens[here - 1]]
    return tokens.astype(np.uint32)


def is_held_out(number: int, share: float) -> bool:
    """Whether piece `number` is one of the evenly spaced ones that make up the share."""
    return int((number + 1) * share + 0.5) > int(number * share + 0.5)


def load_corpus(data: DataConfig, tokenizer: Tokenizer, vocab: int) -> Corpus:
    """Read, tokenize and split; refuse what is too short or does not fit the model."""
    if tokenizer.size > vocab:
        raise UserError(
            f"model.vocab = {vocab}, but data.tokenizer = {data.tokenizer} has {tokenizer.size} tokens; "
            f"set model.vocab to at least {tokenizer.size}"
        )
    if data.source == "zipf":
        return Corpus(
            zipf_tokens(ZIPF_LENGTH, tokenizer.size, 1),
            zipf_tokens(int(ZIPF_LENGTH * data.held_out), tokenizer.size, 2),
        )
    dtype = np.uint8 if tokenizer.size <= 2**8 else np.uint16 if tokenizer.size <= 2**16 else np.uint32
    sides: dict[bool, list[np.ndarray]] = {False: [], True: []}
    lengths: dict[bool, list[int]] = {False: [], True: []}  # of what each document gave to a side
    end = np.array([tokenizer.end], dtype=dtype)
    number = 0
    for text in source_documents(data):
        before = {side: len(parts) for side, parts in sides.items()}
        for piece in split_at_line_ends(text):
            sides[is_held_out(number, data.held_out)].append(tokenizer.encode(piece).astype(dtype))
            number += 1
        sides[False].append(end)
        for side, parts in sides.items():
            lengths[side].append(sum(map(len, parts[before[side] :])))
    rows = (np.concatenate(parts) if parts else np.empty(0, dtype) for parts in sides.values())
    corpus = Corpus(*rows, *map(document_starts, lengths.values()))
    shortest = min(len(corpus.train), len(corpus.held_out))
    for what, tokens in (("to train on", corpus.train), ("held out for validation", corpus.held_out)):
        if len(tokens) <= data.seq_len:
            shorter = f"set data.seq_len below {shortest}, " if shortest > 1 else ""
            raise UserError(
                f"the text gives {len(tokens)} tokens {what}; expected more than data.seq_len = {data.seq_len}; "
                f"add text, {shorter}or change data.held_out = {data.held_out:g}"
            )
    return corpus


def document_starts(lengths: list[int]) -> np.ndarray:
    """Where documents of these lengths, which may be none, begin in a row of them."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    return np.unique(ends[:-1])


def split_at_line_ends(text: str, size: int = 2048) -> list[str]:
    """The text in parts of about `size` characters that end at line ends where there are any."""
    parts, start = [], 0
    while start < len(text):
        end = start + size
        newline = text.rfind("\n", start, end) if end < len(text) else -1
        end = newline + 1 if newline > start else end
        parts.append(text[start:end])
        start = end
    return parts
