"""Sequences of a run by their number: windows of one row in memory, or of the document streams of prepared sources.

Torch-free. The order depends on the seed and the data alone, so that one number is the position of a run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from moefold.data.cut_samples import CutSamples, count_cuts
from moefold.data.document_stream import DocumentId, DocumentStream, Window
from moefold.data.mixture import Mixture
from moefold.data.recent import Recent
from moefold.data.shuffle import shuffled_order
from moefold.layout.labels import IGNORE_INDEX


class SequenceArrays(NamedTuple):
    """A sequence as a batch has it. `begins`: where each token's document begins, if tokens attend within documents.
    `filled`: the tokens before the padding, in a packed sequence."""

    tokens: np.ndarray
    labels: np.ndarray
    begins: np.ndarray | None = None
    filled: int | None = None


class Sequences(Protocol):
    """The sequences of one side of the data. `windows`: those of one epoch. `has_documents`: tokens attend within
    documents, so that windows say where each token's document begins."""

    tokens: int
    windows: int
    seq_len: int
    has_documents: bool

    def arrays(self, number: int) -> SequenceArrays: ...

    def documents(self, number: int) -> list[DocumentId]:
        """The documents whose tokens a sequence has, in its order."""
        ...

    def source_counts(self, number: int) -> dict[str, int]:
        """By the digest of a source: the sequences it has given before sequence `number`. Empty for text in memory."""
        ...

    def epochs(self, number: int) -> dict[str, float]:
        """By the name of a source: how often sequences before `number` have gone through it."""
        ...


class TextDocuments(NamedTuple):
    """The documents of one array of tokens: their source, and where each begins."""

    source: str
    starts: np.ndarray

    def between(self, start: int, end: int) -> list[DocumentId]:
        """The documents that have tokens from `start` to before `end`."""
        first, last = np.searchsorted(self.starts, (start, end - 1), side="right").tolist()
        return [DocumentId(self.source, number - 1) for number in range(first, last + 1)]


ONE_TEXT = TextDocuments("text", np.zeros(1, dtype=np.int64))


class RowSequences:
    """Non-overlapping windows of one long array of tokens, shuffled anew in every epoch. `starts`: where documents
    begin, if tokens attend within documents. `mask`: which tokens are trained; None: all. `text`: the documents,
    whether tokens attend within them or not."""

    def __init__(
        self,
        row: np.ndarray,
        seq_len: int,
        seed: int,
        starts: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        text: TextDocuments = ONE_TEXT,
    ):
        self.row = row
        self.seq_len = seq_len
        self.seed = seed
        self.starts = starts
        self.mask = mask
        self.text = text
        self.has_documents = starts is not None
        self.tokens = len(row)
        self.windows = (len(row) - 1) // seq_len

    def arrays(self, number: int) -> SequenceArrays:
        window = self.window(number)
        return arrays_of_window(window, self.has_documents)

    def window(self, number: int) -> Window:
        start = self.start_of_sequence(number)
        end = start + self.seq_len + 1
        ids = self.row[start:end]
        begins = np.zeros(0, dtype=np.int32)
        if self.starts is not None:
            begins = document_begins(self.starts, start, end)
        mask = None if self.mask is None else self.mask[start:end]
        return Window(ids, begins, mask)

    def documents(self, number: int) -> list[DocumentId]:
        start = self.start_of_sequence(number)
        return self.text.between(start, start + self.seq_len)

    def start_of_sequence(self, number: int) -> int:
        """Where the window that is the number-th sequence of the run begins."""
        epoch, index = divmod(number, self.windows)
        permutation = epoch_permutation(self.seed, epoch, self.windows)
        window = int(permutation[index])
        return window * self.seq_len

    def source_counts(self, number: int) -> dict[str, int]:
        return {}

    def epochs(self, number: int) -> dict[str, float]:
        return {}


def arrays_of_window(window: Window, has_documents: bool) -> SequenceArrays:
    """Tokens of a window, with the tokens one place on for labels. A label that begins a document must not be predicted
    from the document before."""
    tokens = window.ids[:-1].astype(np.int64)
    labels = labels_of(window)
    if not has_documents:
        return SequenceArrays(tokens, labels)
    next_positions = np.arange(1, len(window.ids))
    begins_document = window.begins[1:] == next_positions
    labels[begins_document] = IGNORE_INDEX
    return SequenceArrays(tokens, labels, window.begins[:-1])


def labels_of(window: Window) -> np.ndarray:
    """The labels of all tokens of a window but the last: the tokens behind them, where these are trained."""
    labels = window.ids[1:].astype(np.int64)
    if window.mask is not None:
        is_trained = window.mask[1:]
        labels[~is_trained] = IGNORE_INDEX
    return labels


def document_begins(
    starts: np.ndarray,
    start: int,
    end: int,
) -> np.ndarray:
    """For each token of a window: the position in the window at which its document begins, zero if that is before."""
    positions = np.arange(start, end)
    next_document = np.searchsorted(starts, positions, side="right")
    document = next_document - 1
    begins = starts[document] - start
    inside = np.maximum(begins, 0)
    return inside.astype(np.int32)


@lru_cache(maxsize=4)
def epoch_permutation(seed: int, epoch: int, windows: int) -> np.ndarray:
    bits = np.random.PCG64([seed, epoch])
    generator = np.random.Generator(bits)
    return generator.permutation(windows)


class DocumentOrder(NamedTuple):
    """The documents of an epoch in their order: where each ends, and the distance to its place in the array."""

    ends: np.ndarray
    distances: np.ndarray


class MemoryDocuments:
    """The documents of one array of tokens in random order, epoch after epoch, as one row without end."""

    def __init__(
        self,
        tokens: np.ndarray,
        text: TextDocuments,
        seed: int,
        mask: np.ndarray | None = None,
    ):
        self.tokens = tokens
        self.text = text
        self.starts = text.starts
        self.seed = seed
        self.mask = mask
        self.predicted = len(tokens) - len(self.starts)
        self.orders = Recent(self.shuffle_documents, 2)

    def shuffle_documents(self, epoch: int) -> DocumentOrder:
        order = shuffled_order(len(self.starts), self.seed, epoch)
        lengths = np.diff(self.starts, append=len(self.tokens))
        shuffled = lengths[order]
        ends = np.cumsum(shuffled)
        begins = ends - shuffled
        return DocumentOrder(ends, self.starts[order] - begins)

    def document_end(self, position: int) -> int:
        """Where the document of a token of the row ends."""
        epoch, inside = divmod(position, len(self.tokens))
        ends = self.orders.get(epoch).ends
        document = np.searchsorted(ends, inside, side="right")
        return position - inside + int(ends[document])

    def read(self, start: int, end: int) -> Window:
        """Tokens of the row, of one document."""
        first = self.place_of(start)
        length = end - start
        here = slice(first, first + length)
        ids = self.tokens[here]
        begins = np.zeros(length, dtype=np.int32)
        mask = None if self.mask is None else self.mask[here]
        return Window(ids, begins, mask)

    def has_mask(self, position: int) -> bool:
        return self.mask is not None

    def cut_samples(self, seq_len: int) -> CutSamples:
        mask = self.mask
        if mask is None:
            return CutSamples()
        bounds = np.append(self.starts, len(self.tokens))
        return count_cuts(bounds, lambda start, end: mask[start:end], seq_len)

    def place_of(self, position: int) -> int:
        """The place in the array of a token of the row."""
        epoch, inside = divmod(position, len(self.tokens))
        order = self.orders.get(epoch)
        document = np.searchsorted(order.ends, inside, side="right")
        return inside + int(order.distances[document])

    def documents(self, start: int, end: int) -> list[DocumentId]:
        """The document of some tokens of the row."""
        first = self.place_of(start)
        return self.text.between(first, first + end - start)


class NamedStream(NamedTuple):
    """The stream of a source, its name for people and the digest of its tokens."""

    name: str
    digest: str
    stream: DocumentStream


class MixedSequences:
    """Sequences of several prepared sources, as a mixture says."""

    def __init__(
        self,
        sources: list[NamedStream],
        mixture: Mixture,
        seq_len: int,
        has_documents: bool,
    ):
        self.sources = sources
        self.mixture = mixture
        self.seq_len = seq_len
        self.has_documents = has_documents
        sizes = [source.stream.tokens for source in sources]
        self.tokens = sum(sizes)
        self.windows = (self.tokens - 1) // seq_len

    def arrays(self, number: int) -> SequenceArrays:
        window = self.window(number)
        return arrays_of_window(window, self.has_documents)

    def window(self, number: int) -> Window:
        place = self.mixture.place(number)
        source = self.sources[place.source]
        return source.stream.window(place.number)

    def documents(self, number: int) -> list[DocumentId]:
        place = self.mixture.place(number)
        stream = self.sources[place.source].stream
        return stream.documents(*stream.window_bounds(place.number))

    def source_counts(self, number: int) -> dict[str, int]:
        digests = [source.digest for source in self.sources]
        counts = self.mixture.counts(number)
        return dict(zip(digests, counts, strict=True))

    def epochs(self, number: int) -> dict[str, float]:
        epochs: dict[str, float] = {}
        counts = self.mixture.counts(number)
        for source, count in zip(self.sources, counts, strict=True):
            read = count * self.seq_len
            epochs[source.name] = read / source.stream.tokens
        return epochs
