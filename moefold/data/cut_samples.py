"""Samples that `data.seq_len` cuts: how many, and how many of them before their first trained token. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from moefold.data.document_split import DocumentTokens
from moefold.data.entries import SampleReader

ReadMask = Callable[[int, int], np.ndarray]  # of the tokens from the first to before the second


class CutSamples(NamedTuple):
    """`untrained`: cut before the first trained token. `longest`: the inputs of the longest sample."""

    samples: int = 0
    cut: int = 0
    untrained: int = 0
    longest: int = 0


def count_cuts(bounds: np.ndarray, read_mask: ReadMask, seq_len: int) -> CutSamples:
    """Of documents with a mask. `bounds`: where they begin, and the end of the last one."""
    inputs = np.diff(bounds) - 1  # the last token is a label alone
    cut = np.flatnonzero(inputs > seq_len)
    untrained = 0
    for start in bounds[cut].tolist():
        labels = read_mask(start + 1, start + seq_len + 1)
        untrained += not labels.any()
    return CutSamples(len(inputs), len(cut), untrained, int(inputs.max(initial=0)))


def sum_cuts(counts: Iterable[CutSamples]) -> CutSamples:
    total = CutSamples()
    for each in counts:
        longest = max(total.longest, each.longest)
        total = CutSamples(
            total.samples + each.samples, total.cut + each.cut, total.untrained + each.untrained, longest
        )
    return total


def cuts_of_documents(documents: Iterable[DocumentTokens], seq_len: int) -> CutSamples:
    """Of samples that are read one after the other."""
    return sum_cuts(cuts_of_document(document, seq_len) for document in documents)


def cuts_of_document(document: DocumentTokens, seq_len: int) -> CutSamples:
    mask = document.mask
    if mask is None:
        return CutSamples()
    bounds = np.array([0, len(mask)])
    return count_cuts(bounds, lambda start, end: mask[start:end], seq_len)


def cut_text(cuts: CutSamples, seq_len: int) -> str:
    """What is cut, in words, and the length that cuts nothing."""
    untrained = f", {cuts.untrained} of them before the first trained token" if cuts.untrained else ""
    line = f"data.seq_len = {seq_len} cuts {cuts.cut} of {cuts.samples} samples{untrained}"
    return f"{line}; set data.seq_len to {cuts.longest} for whole samples" if cuts.cut else line


class FittingSamples:
    """Samples of a reader, each with a trained token among those that `seq_len` leaves of it."""

    def __init__(self, reader: SampleReader, seq_len: int):
        self.reader = reader
        self.identity = reader.identity
        self.seq_len = seq_len

    def documents(self, fields: dict[str, Any]) -> list[DocumentTokens]:
        documents = self.reader.documents(fields)
        for document in documents:
            self.refuse_untrained(document)
        return documents

    def refuse_untrained(self, document: DocumentTokens) -> None:
        if document.mask is None or document.mask[1 : self.seq_len + 1].any():
            return
        first = int(np.argmax(document.mask))
        raise ValueError(
            f"has its first trained token behind {first} others; expected it among the first data.seq_len = "
            f"{self.seq_len} and the one behind them, since longer samples are cut; set data.seq_len to at least "
            f"{len(document)}"
        )
