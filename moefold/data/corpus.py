"""The corpus in memory: all documents as two long arrays of token ids, one to train on and one held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from moefold.config.errors import UserError
from moefold.config.run import TRAINED, DataConfig
from moefold.data.cut_samples import FittingSamples
from moefold.data.document_split import (
    DocumentTokens,
    JoinedDocuments,
    join_documents,
    single_document_start,
    smallest_dtype,
    split_documents,
)
from moefold.data.documents import source_entries
from moefold.data.entries import BadEntries, entry_documents
from moefold.data.mixture import WHOLE, Mixture
from moefold.data.packed_sequences import PackedSequences, PackedSource
from moefold.data.preferences import PreferenceDocuments
from moefold.data.sample_batches import packing_kind
from moefold.data.samples import sample_reader
from moefold.data.sequences import MemoryDocuments, RowSequences, TextDocuments
from moefold.data.tokenizer import Tokenizer
from moefold.data.trained_vocabulary import read_text_sides

ZIPF_LENGTH = 1 << 22  # tokens of the synthetic corpus


@dataclass(frozen=True)
class Corpus:
    """Token ids of both sides, the positions at which documents begin, and which tokens are trained; None: all."""

    train: np.ndarray
    held_out: np.ndarray
    train_starts: np.ndarray = field(default_factory=single_document_start)
    held_out_starts: np.ndarray = field(default_factory=single_document_start)
    skipped: tuple[str, ...] = ()  # what could not be read
    train_mask: np.ndarray | None = None
    held_out_mask: np.ndarray | None = None

    def train_sequences(self, data: DataConfig, seed: int, batch: int) -> RowSequences:
        starts = self.train_starts if data.attend == "document" else None
        text = self.train_documents(data)
        return RowSequences(self.train, data.seq_len, seed, starts, self.train_mask, text)

    def train_documents(self, data: DataConfig) -> TextDocuments:
        return TextDocuments(data.source, self.train_starts)

    def packed_sequences(self, data: DataConfig, seed: int, batch: int) -> PackedSequences:
        windows = self.train_sequences(data, seed, batch)
        return self.pack_windows(windows, self.train_documents(data), data, batch)

    def held_out_sequences(self, data: DataConfig) -> RowSequences | PackedSequences:
        """Validation has the same sequences in every run: its seed is 0. Preferences are packed, never cut."""
        starts = self.held_out_starts if data.attend == "document" else None
        windows = RowSequences(self.held_out, data.seq_len, 0, starts, self.held_out_mask)
        if data.format != "preferences":
            return windows
        text = TextDocuments(data.source, self.held_out_starts)
        in_bins = replace(data, batch_of="sequences")
        return self.pack_windows(windows, text, in_bins, windows.windows)

    def pack_windows(self, windows: RowSequences, text: TextDocuments, data: DataConfig, batch: int) -> PackedSequences:
        """Bins of documents in place of windows."""
        kind = PreferenceDocuments if data.format == "preferences" else MemoryDocuments
        documents = kind(windows.row, text, windows.seed, windows.mask)
        source = PackedSource(self.fingerprint(), documents)
        return packing_kind(data)(windows, [source], Mixture(WHOLE, batch), batch, data.packing)

    def fingerprint(self) -> str:
        """A digest of the tokens, of where documents begin, and of masks."""
        digest = hashlib.blake2b(digest_size=8)
        masks = [mask for mask in (self.train_mask, self.held_out_mask) if mask is not None]
        for array in (self.train, self.held_out, self.train_starts, self.held_out_starts, *masks):
            shape = str(array.shape)
            digest.update(shape.encode())
            values = np.ascontiguousarray(array)
            digest.update(values.data)
        return digest.hexdigest()


def load_corpus(data: DataConfig, tokenizer: Tokenizer, vocab: int) -> Corpus:
    """Read, tokenize and split the text. Refuses a text that is too short and a tokenizer that does not fit."""
    refuse_large_tokenizer(data, tokenizer, vocab)
    if data.source == "zipf":
        return zipf_corpus(data, tokenizer.size)
    corpus = read_corpus(data, tokenizer)
    refuse_short_corpus(data, corpus)
    return corpus


def refuse_large_tokenizer(data: DataConfig, tokenizer: Tokenizer, vocab: int) -> None:
    if tokenizer.size > vocab:
        raise UserError(
            f"model.vocab = {vocab}, but data.tokenizer = {data.tokenizer} has {tokenizer.size} tokens; "
            f"set model.vocab to at least {tokenizer.size}"
        )


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


def read_corpus(data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    if data.tokenizer == TRAINED:
        return encode_text_sides(data, tokenizer)
    dtype = smallest_dtype(tokenizer.size)
    documents: list[DocumentTokens] = []
    bad = BadEntries(data.skip_bad, "data.files: ")
    samples = sample_reader(data, tokenizer)
    if samples is not None and data.packing != "windows":
        samples = FittingSamples(samples, data.seq_len)
    for entry in source_entries(data):
        for document in entry_documents(entry, tokenizer, bad, samples):
            stored = replace(document, ids=document.ids.astype(dtype))
            documents.append(stored)
    total = sum(map(len, documents))
    sides = split_documents(documents, data.held_out, tokenizer, total)
    train, held_out = (join_documents(side, dtype, tokenizer.end.id) for side in sides)
    return Corpus(
        train.tokens,
        held_out.tokens,
        train.starts,
        held_out.starts,
        tuple(bad.problems),
        train.mask,
        held_out.mask,
    )


def encode_text_sides(data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The corpus of a vocabulary that was trained on one side of the text."""
    texts = read_text_sides(data)
    dtype = smallest_dtype(tokenizer.size)
    joined: list[JoinedDocuments] = []
    for side in (texts.train, texts.held_out):
        documents = [DocumentTokens(tokenizer.encode(text).astype(dtype)) for text in side]
        joined.append(join_documents(documents, dtype, tokenizer.end.id))
    train, held_out = joined
    return Corpus(train.tokens, held_out.tokens, train.starts, held_out.starts, texts.skipped)


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
