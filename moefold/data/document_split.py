"""The split of documents into those to train on and those held out, and documents joined to one array.

Evenly spaced documents are held out. A document that is long beside what is to be held out is cut in two instead: its
last part is held out. The same documents give the same split on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moefold.data.tokenizer import Tokenizer

LARGEST_WHOLE = 0.25  # of the smaller side: longer documents are cut
LINE_SEARCH = 4096  # tokens that are searched for a line end to cut at


@dataclass(frozen=True)
class DocumentTokens:
    """Token ids of a document, without its end token. `mask`: which of them are trained, and whether the end token
    behind them is; None: all are."""

    ids: np.ndarray
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


class JoinedDocuments(NamedTuple):
    """All tokens, with the end token behind every document; where documents begin; which tokens are trained, None
    where all are."""

    tokens: np.ndarray
    starts: np.ndarray
    mask: np.ndarray | None


def single_document_start() -> np.ndarray:
    return np.zeros(1, dtype=np.int64)


def smallest_dtype(vocab: int) -> np.dtype:
    if vocab <= 2**8:
        return np.dtype(np.uint8)
    if vocab <= 2**16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def split_documents(
    documents: list[DocumentTokens],
    share: float,
    tokenizer: Tokenizer,
    total: int,
) -> tuple[list[DocumentTokens], list[DocumentTokens]]:
    """Documents to train on and documents held out: at any point of the text, the tokens held out are their share of
    those before it, to within half a document. `total`: tokens of the whole text, of which documents may be a part.
    A document with a mask is a sample that means nothing in parts: it is never cut."""
    train: list[DocumentTokens] = []
    held_out: list[DocumentTokens] = []
    smaller_share = min(share, 1 - share)
    smaller_side = smaller_share * total
    owed = 0.0  # tokens that should be held out so far, less those that are
    for document in documents:
        is_long = len(document) > LARGEST_WHOLE * smaller_side
        if is_long and document.mask is None:
            cut = cut_at_line_end(document.ids, share, tokenizer)
            first, last = document.ids[:cut], document.ids[cut:]
            if len(first):
                train.append(DocumentTokens(first))
            if len(last):
                held_out.append(DocumentTokens(last))
            continue
        owed += share * len(document)
        if owed >= len(document) / 2:
            held_out.append(document)
            owed -= len(document)
        else:
            train.append(document)
    return train, held_out


def cut_at_line_end(ids: np.ndarray, share: float, tokenizer: Tokenizer) -> int:
    """Where the held-out part of a document begins: behind a line end, if there is one near."""
    wanted = round(len(ids) * (1 - share))
    end = min(len(ids), wanted + LINE_SEARCH)
    for position in range(wanted, end):
        before = int(ids[position - 1])
        if tokenizer.decode([before]).endswith("\n"):
            return position
    return wanted


def join_documents(
    documents: list[DocumentTokens],
    dtype: np.dtype,
    end: int,
) -> JoinedDocuments:
    if not documents:
        return JoinedDocuments(np.empty(0, dtype), single_document_start(), None)
    end_token = np.array([end], dtype=dtype)
    parts: list[np.ndarray] = []
    starts: list[int] = []
    position = 0
    for document in documents:
        parts += [document.ids, end_token]
        starts.append(position)
        position += len(document) + 1
    joined = np.concatenate(parts)
    return JoinedDocuments(joined, np.asarray(starts), join_masks(documents))


def join_masks(documents: list[DocumentTokens]) -> np.ndarray | None:
    """The masks of all documents, with those of their end tokens; None where no document has one."""
    if all(document.mask is None for document in documents):
        return None
    masks: list[np.ndarray] = []
    for document in documents:
        mask = document.mask
        if mask is None:
            mask = np.ones(len(document) + 1, dtype=bool)
        masks.append(mask)
    return np.concatenate(masks)
