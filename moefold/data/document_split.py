"""The split of documents into those to train on and those held out, and documents joined to one array.

Evenly spaced documents are held out. A document that is long beside what is to be held out is cut in two instead: its
last part is held out. The same documents give the same split on every machine.
"""

from __future__ import annotations

import numpy as np

from moefold.data.tokenizer import Tokenizer

LARGEST_WHOLE = 0.25  # of the smaller side: longer documents are cut
LINE_SEARCH = 4096  # tokens that are searched for a line end to cut at


def single_document_start() -> np.ndarray:
    return np.zeros(1, dtype=np.int64)


def smallest_dtype(vocab: int) -> np.dtype:
    if vocab <= 2**8:
        return np.dtype(np.uint8)
    if vocab <= 2**16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def split_documents(
    documents: list[np.ndarray],
    share: float,
    tokenizer: Tokenizer,
    total: int,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Documents to train on and documents held out: at any point of the text, the tokens held out are their share of
    those before it, to within half a document. `total`: tokens of the whole text, of which documents may be a part."""
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    smaller_share = min(share, 1 - share)
    smaller_side = smaller_share * total
    owed = 0.0  # tokens that should be held out so far, less those that are
    for document in documents:
        if len(document) > LARGEST_WHOLE * smaller_side:
            cut = cut_at_line_end(document, share, tokenizer)
            first, last = document[:cut], document[cut:]
            if len(first):
                train.append(first)
            if len(last):
                held_out.append(last)
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


def join_documents(
    documents: list[np.ndarray],
    dtype: np.dtype,
    end: int,
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, with the end token behind every document; and where documents begin."""
    if not documents:
        return np.empty(0, dtype), single_document_start()
    end_token = np.array([end], dtype=dtype)
    parts: list[np.ndarray] = []
    starts: list[int] = []
    position = 0
    for document in documents:
        parts += [document, end_token]
        starts.append(position)
        position += len(document) + 1
    joined = np.concatenate(parts)
    return joined, np.asarray(starts)
