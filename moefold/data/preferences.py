"""Preferences in a row of documents: a chosen and a rejected response, each behind its prompt, in one document. The
rejected half begins behind the first trained run of the document's mask. Torch-free."""

from __future__ import annotations

import numpy as np

from moefold.config.errors import UserError
from moefold.data.document_stream import DocumentStream, Window
from moefold.data.sequences import MemoryDocuments


class PreferenceDocuments(MemoryDocuments):
    """Documents in memory whose halves see nothing of each other."""

    def read(self, start: int, end: int) -> Window:
        return separate_halves(super().read(start, end))


class PreferenceStream(DocumentStream):
    """Documents of a prepared source whose halves see nothing of each other."""

    def read(self, start: int, end: int) -> Window:
        return separate_halves(super().read(start, end))


def separate_halves(window: Window) -> Window:
    """The window of a whole document, whose rejected half begins a document of its own."""
    half = rejected_half(window.mask)
    window.begins[half:] = half
    return window


def rejected_half(mask: np.ndarray | None) -> int:
    """Where the rejected half of a document begins."""
    changes = np.flatnonzero(np.diff(mask)) if mask is not None else np.zeros(0)
    if len(changes) != 3:
        raise UserError(
            "a document has no two responses behind prompts; expected data that was read with data.format = preferences"
        )
    return int(changes[1]) + 1
