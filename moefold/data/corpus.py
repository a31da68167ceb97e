"""The corpus: all documents as two long arrays of token ids, one to train on and one held out.

Documents are tokenized whole, and evenly spaced ones are held out. A document that is long beside what is to be held
out is cut in two instead: its last part is held out. The same text gives the same split on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.documents import source_documents
from moefold.data.tokenizer import Tokenizer

ZIPF_LENGTH = 1 << 22  # tokens of the synthetic corpus
LARGEST_WHOLE = 0.25  # of the smaller side: longer documents are cut
LINE_SEARCH = 4096  # tokens that are searched for a line end to cut at


def single_document_start() -> np.ndarray:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Corpus:
    """Token ids of both sides, and the positions at which documents begin."""

    train: np.ndarray
    held_out: np.ndarray
    train_starts: np.ndarray = field(default_factory=single_document_start)
    held_out_starts: np.ndarray = field(default_factory=single_document_start)


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


def random_generator(seed: int) -> np.random.Generator:
    bits = np.random.PCG64(seed)
    return np.random.Generator(bits)


def zipf_tokens(count: int, vocab: int, seed: int) -> np.ndarray:
    """Random tokens with Zipf's frequencies, half of them the fixed successor of the token before: learnable data for
    benchmarks, which unbalances a router."""
    shares = 1 / np.arange(1, vocab + 1)
    shares /= shares.sum()
    fixed = random_generator(0)  # the same successors for every seed
    successor = fixed.choice(vocab, size=vocab, p=shares)
    generator = random_generator(seed)
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
    documents: list[np.ndarray] = []
    for text in source_documents(data):
        tokens = tokenizer.encode(text)
        documents.append(tokens.astype(dtype))
    train, held_out = split_documents(documents, data.held_out, tokenizer)
    train_tokens, train_starts = join_documents(train, dtype, tokenizer.end.id)
    held_out_tokens, held_out_starts = join_documents(held_out, dtype, tokenizer.end.id)
    return Corpus(train_tokens, held_out_tokens, train_starts, held_out_starts)


def split_documents(
    documents: list[np.ndarray], share: float, tokenizer: Tokenizer
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Documents to train on and documents held out: at any point of the text, the tokens held out are their share of
    those before it, to within half a document."""
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    smaller_share = min(share, 1 - share)
    smaller_side = smaller_share * sum(map(len, documents))
    owed = 0.0  # tokens that should be held out so far, less those that are
    for document in documents:
        if len(document) > LARGEST_WHOLE * smaller_side:
            cut = cut_at_line_end(document, share, tokenizer)
            train.append(document[:cut])
            held_out.append(document[cut:])
            continue
        owed += share * len(document)
        if owed >= len(document) / 2:
            held_out.append(document)
            owed -= len(document)
        else:
            train.append(document)
    return train, held_out


def cut_at_line_end(document: np.ndarray, share: float, tokenizer: Tokenizer) -> int:
    """Where the held-out part of a document begins: behind a line end, if there is one near."""
    wanted = round(len(document) * (1 - share))
    end = min(len(document), wanted + LINE_SEARCH)
    for position in range(wanted, end):
        before = int(document[position - 1])
        if tokenizer.decode([before]).endswith("\n"):
            return position
    return wanted


def join_documents(documents: list[np.ndarray], dtype: np.dtype, end: int) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, with the end token behind every document; and where documents begin."""
    if not documents:
        return np.empty(0, dtype), single_document_start()
    end_token = np.array([end], dtype=dtype)
    parts: list[np.ndarray] = []
    for document in documents:
        parts += [document, end_token]
    lengths = [len(document) + 1 for document in documents]
    begins = [0, *lengths[:-1]]
    starts = np.cumsum(begins, dtype=np.int64)
    return np.concatenate(parts), starts


def refuse_short_corpus(data: DataConfig, corpus: Corpus) -> None:
    """Refuse a side that is not longer than a sequence."""
    sizes = len(corpus.train), len(corpus.held_out)
    shortest = min(sizes)
    shorter = f"set data.seq_len below {shortest}, " if shortest > 1 else ""
    sides = {"to train on": corpus.train, "held out for validation": corpus.held_out}
    for purpose, tokens in sides.items():
        if len(tokens) <= data.seq_len:
            raise UserError(
                f"the text gives {len(tokens)} tokens {purpose}; expected more than data.seq_len = {data.seq_len}; "
                f"add text, {shorter}or change data.held_out = {data.held_out:g}"
            )
