"""The vocabulary that a run trains on its own text: the split of the text, and the part of it that training reads.

What is held out is not read. So the text is split before there are tokens: documents count by their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.document_split import DocumentTokens, split_documents
from moefold.data.documents import source_entries
from moefold.data.entries import BadEntries, TokenIds, entry_documents
from moefold.data.tokenizer import ByteTokenizer
from moefold.data.tokenizer_engine import train_byte_pairs

READ_CHARACTERS = 1 << 22  # of the text: some two seconds of CPU time
EXCERPT = 1 << 14  # characters
USUAL_END_TOKEN = "<|endoftext|>"


class TextSides(NamedTuple):
    """Documents to train on, documents held out, and what could not be read."""

    train: list[str]
    held_out: list[str]
    skipped: tuple[str, ...] = ()


def read_text_sides(data: DataConfig) -> TextSides:
    tokenizer = ByteTokenizer()
    bad = BadEntries(data.skip_bad, "data.files: ")
    documents: list[DocumentTokens] = []
    for entry in source_entries(data):
        if isinstance(entry, TokenIds):
            raise UserError(
                f"{entry.place}: token ids, but data.tokenizer = trained needs text; name the tokenizer of these ids"
            )
        documents += entry_documents(entry, tokenizer, bad)
    total = sum(map(len, documents))
    train, held_out = split_documents(documents, data.held_out, tokenizer, total)
    return TextSides(document_texts(train), document_texts(held_out), tuple(bad.problems))


def document_texts(documents: list[DocumentTokens]) -> list[str]:
    """A document without a line end may be cut within a character, which is left out."""
    return [document.ids.tobytes().decode("utf-8", errors="ignore") for document in documents]


def train_vocabulary(data: DataConfig, entries: int) -> str:
    """The tokenizer.json of a vocabulary of at most so many byte pairs. The same text gives the same vocabulary."""
    texts = read_text_sides(data).train
    return train_byte_pairs(spread_excerpts(texts), entries, end_token_of(data))


def end_token_of(data: DataConfig) -> str:
    return data.end_token or USUAL_END_TOKEN


def spread_excerpts(texts: list[str], limit: int = READ_CHARACTERS) -> Iterator[str]:
    """Excerpts of about `limit` characters, spread evenly over all texts; the whole of shorter texts."""
    total = sum(map(len, texts))
    passed = given = 0
    for text in texts:
        for begin in range(0, len(text), EXCERPT):
            excerpt = text[begin : begin + EXCERPT]
            if given * total <= limit * passed:
                yield excerpt
                given += len(excerpt)
            passed += len(excerpt)
