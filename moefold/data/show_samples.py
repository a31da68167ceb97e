"""Samples as people read them: the text of documents, with trained tokens painted. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.cut_samples import count_cuts, cut_text, cuts_of_documents, sum_cuts
from moefold.data.document_split import DocumentTokens
from moefold.data.documents import file_entries
from moefold.data.entries import BadEntries, entry_documents
from moefold.data.prepared_folder import INDEX_NAME, PreparedIndex, read_index, saved_tokenizer
from moefold.data.samples import sample_reader
from moefold.data.shards import Shard
from moefold.data.tokenizer import Tokenizer, choose_tokenizer, load_tokenizer
from moefold.printable import escape_character

Painter = Callable[[str], str]
Printer = Callable[[str], None]


def paint_green(text: str) -> str:
    return f"\x1b[32m{text}\x1b[0m"


def put_in_brackets(text: str) -> str:
    """For what is no terminal with colours."""
    return f"[[{text}]]"


class SampleView:
    """Prints `count` documents of a folder or file, the first by its number. With `seq_len` it also prints how many
    samples sequences of that length cut, of all that are there."""

    def __init__(
        self,
        first: int,
        count: int,
        paint: Painter,
        say: Printer,
        seq_len: int | None = None,
    ):
        self.first = first
        self.count = count
        self.paint = paint
        self.say = say
        self.seq_len = seq_len

    def show_folder(self, folder: Path, side: str) -> None:
        """Samples of a prepared folder."""
        index = read_index(folder)
        there = index.documents(side)
        if self.first >= there:
            raise UserError(
                f"--document {self.first}: {folder / side} has {there} documents; expected 0 to {there - 1}"
            )
        tokenizer = load_tokenizer(saved_tokenizer(folder), index.vocab_size)
        self.show(folder_documents(folder, index, side, self.first), tokenizer)
        if self.seq_len is not None:
            shards = folder_shards(folder, index, side) if index.has_masks else []
            cuts = sum_cuts(count_cuts(shard.bounds, shard.read_mask, self.seq_len) for shard in shards)
            self.say(cut_text(cuts, self.seq_len))

    def show_file(self, data: DataConfig, vocab: int) -> None:
        """Samples of `data.files` as a preparation would make them. Without `seq_len` no more is read than is shown."""
        name = choose_tokenizer(data, vocab)
        tokenizer = load_tokenizer(name, vocab, data.end_token)
        documents = islice(file_documents(data, tokenizer), self.first, None)
        self.show(documents, tokenizer)
        if self.seq_len is not None:
            cuts = cuts_of_documents(file_documents(data, tokenizer), self.seq_len)
            self.say(cut_text(cuts, self.seq_len))

    def show(self, documents: Iterator[DocumentTokens], tokenizer: Tokenizer) -> None:
        for number, document in enumerate(islice(documents, self.count), start=self.first):
            mask = whole_mask(document)
            trained = int(mask.sum())
            self.say(f"document {number}: {len(mask)} tokens, {trained} trained")
            text = painted_text(document, tokenizer, self.paint)
            self.say(f"{text}\n")


def is_prepared(path: Path) -> bool:
    return (path / INDEX_NAME).is_file()


def folder_documents(folder: Path, index: PreparedIndex, side: str, first: int) -> Iterator[DocumentTokens]:
    """The documents of a side from a number on."""
    for facts in index.shards[side]:
        skipped = min(first, facts.documents)
        first -= skipped
        if skipped == facts.documents:
            continue
        shard = Shard(folder / side, facts, index.token_type, index.has_masks)
        bounds = shard.bounds[skipped:].tolist()
        for start, stop in pairwise(bounds):
            ids = shard.read(start, stop)
            mask = shard.read_mask(start, stop)
            yield DocumentTokens(ids[:-1], mask)


def folder_shards(folder: Path, index: PreparedIndex, side: str) -> list[Shard]:
    return [Shard(folder / side, facts, index.token_type, index.has_masks) for facts in index.shards[side]]


def file_documents(data: DataConfig, tokenizer: Tokenizer) -> Iterator[DocumentTokens]:
    samples = sample_reader(data, tokenizer)
    bad = BadEntries(data.skip_bad)
    for entry in file_entries(data):
        yield from entry_documents(entry, tokenizer, bad, samples)


def whole_mask(document: DocumentTokens) -> np.ndarray:
    if document.mask is None:
        return np.ones(len(document) + 1, dtype=bool)
    return document.mask


def painted_text(document: DocumentTokens, tokenizer: Tokenizer, paint: Painter) -> str:
    """The text of a document and its end token, with the trained parts painted. Parts are cut from the text of all
    tokens before their end: what a token is as text may depend on those before it."""
    ids = document.ids.tolist()
    mask = whole_mask(document)
    changes = np.flatnonzero(np.diff(mask)) + 1
    bounds = [0, *changes.tolist(), len(mask)]
    shown = ""
    parts: list[str] = []
    for begin, end in pairwise(bounds):
        text = tokenizer.show(ids[:end])
        if end == len(mask):
            text += tokenizer.end.text
        part = readable(text[len(shown) :])
        parts.append(paint(part) if mask[begin] else part)
        shown = text
    return "".join(parts)


def readable(text: str) -> str:
    """A text as a terminal may have it: control characters but line ends and tabs are escaped."""
    return "".join(each if each in "\n\t" else escape_character(each) for each in text)
