"""The document stream of a source: its documents in random order, epoch after epoch, as one row without end.

    epoch 0 |  chapter 0   |  chapter 1  | epoch 1 |  chapter 0  |   chapter 1  | ...
    shards  |  7  2        |  0  5       |         |  5  7       |   2  0       |
    row     [doc][document][do][doc][document][doc][d][doc] ...
    windows |-------|-------|-------|-------|-------|-------|  of seq_len tokens, in random order within a chapter

An epoch has all shards in random order. A chapter is a run of shards with enough tokens or documents; its documents are
in random order, and so are the windows that begin in it. Every token is in exactly one window of every epoch. What is
held in memory is the order of a few chapters, whatever the size of the source. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moefold.data.cut_samples import CutSamples, count_cuts, sum_cuts
from moefold.data.prepared_folder import PreparedIndex
from moefold.data.recent import Recent
from moefold.data.shards import Shard, ShardFacts
from moefold.data.shuffle import shuffled_order

CHAPTER_TOKENS = 1 << 25
CHAPTER_DOCUMENTS = 1 << 18
KEPT_CHAPTERS = 3
MAPPED_BYTES = 1 << 28  # of shards that stay mapped

SHARDS_KEY, DOCUMENTS_KEY, WINDOWS_KEY = range(3)  # what an order is of


class ShardPlace(NamedTuple):
    """A shard of a source, and where it is."""

    folder: Path
    facts: ShardFacts
    dtype: np.dtype
    has_mask: bool = False


def shard_places(folder: Path, index: PreparedIndex, side: str) -> list[ShardPlace]:
    places: list[ShardPlace] = []
    for facts in index.shards[side]:
        place = ShardPlace(folder / side, facts, index.token_type, index.has_masks)
        places.append(place)
    return places


def first_documents(places: list[ShardPlace]) -> list[int]:
    """The number of each shard's first document among those of its folder."""
    firsts: list[int] = []
    before = Counter[Path]()
    for place in places:
        firsts.append(before[place.folder])
        before[place.folder] += place.facts.documents
    return firsts


class OpenShards:
    """Shards that are mapped; those used longest ago are unmapped when too many bytes are."""

    def __init__(self, places: list[ShardPlace]):
        self.places = places
        self.open: OrderedDict[int, Shard] = OrderedDict()
        self.bytes = 0

    def get(self, number: int) -> Shard:
        if number not in self.open:
            self.map_shard(number)
        self.open.move_to_end(number)
        return self.open[number]

    def map_shard(self, number: int) -> None:
        place = self.places[number]
        shard = Shard(*place)
        self.open[number] = shard
        self.bytes += shard.bytes
        while self.bytes > MAPPED_BYTES and len(self.open) > 1:
            _, oldest = self.open.popitem(last=False)
            self.bytes -= oldest.bytes


class ChapterKey(NamedTuple):
    """Which chapter: the epoch, and its number in the epoch."""

    epoch: int
    number: int


class Chapter(NamedTuple):
    """A run of shards of an epoch; `begin` and `end` are tokens of the row."""

    begin: int
    end: int
    shards: list[int]


class EpochPlan(NamedTuple):
    """The chapters of an epoch, and where each ends."""

    chapters: list[Chapter]
    ends: list[int]


class ChapterOrder(NamedTuple):
    """The documents of a chapter in their order: shard, first token and length of each, and its end in the chapter."""

    shards: np.ndarray
    firsts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray


class DocumentId(NamedTuple):
    """A document by its source, one side of a prepared folder or the text in memory, and by its number there."""

    source: str
    number: int


class Window:
    """Tokens of the row; `begins`: the position in the window at which each token's document begins, at least 0;
    `mask`: which tokens are trained, None where all are."""

    def __init__(
        self,
        ids: np.ndarray,
        begins: np.ndarray,
        mask: np.ndarray | None = None,
    ):
        self.ids = ids
        self.begins = begins
        self.mask = mask


class DocumentStream:
    """The row of a source. The order depends on the keys (seed, identity of the source) alone."""

    def __init__(self, places: list[ShardPlace], seq_len: int, *keys: int):
        self.places = places
        self.seq_len = seq_len
        self.keys = keys
        self.tokens = sum(place.facts.tokens for place in places)
        documents = sum(place.facts.documents for place in places)
        self.predicted = self.tokens - documents  # each has a token of its document before it
        self.has_masks = any(place.has_mask for place in places)
        self.shards = OpenShards(places)
        self.first_documents = first_documents(places)
        self.epochs = Recent(self.plan_epoch, KEPT_CHAPTERS)
        self.orders = Recent(self.shuffle_documents, KEPT_CHAPTERS)
        self.windows = Recent(self.shuffle_windows, KEPT_CHAPTERS)

    def window(self, number: int) -> Window:
        """The number-th window of the stream, and the token behind it, which is a label only."""
        start, end = self.window_bounds(number)
        return self.read(start, end + 1)

    def window_bounds(self, number: int) -> tuple[int, int]:
        """Where the number-th window begins and ends in the row."""
        place = self.window_place(number)
        start = place * self.seq_len
        return start, start + self.seq_len

    def window_place(self, number: int) -> int:
        """Which window of the row is the number-th to be read: one that begins in the same chapter."""
        start = number * self.seq_len
        key = self.chapter_at(start)
        chapter = self.chapter(key)
        first = self.first_window(chapter.begin)
        order = self.windows.get(key)
        place = order[number - first]
        return first + int(place)

    def first_window(self, token: int) -> int:
        """The first window that begins at a token of the row or behind it."""
        return -(-token // self.seq_len)

    def shuffle_windows(self, key: ChapterKey) -> np.ndarray:
        chapter = self.chapter(key)
        first = self.first_window(chapter.begin)
        last = self.first_window(chapter.end)
        return shuffled_order(last - first, *self.keys, WINDOWS_KEY, *key)

    def read(self, start: int, end: int) -> Window:
        """The tokens of the row from `start` to before `end`."""
        count = end - start
        ids = np.empty(count, dtype=np.int64)
        begins = np.empty(count, dtype=np.int32)
        mask = np.empty(count, dtype=bool) if self.has_masks else None
        window = Window(ids, begins, mask)
        filled = 0
        while filled < count:
            position = start + filled
            filled = self.copy_documents(position, window, filled)
        return window

    def copy_documents(self, position: int, window: Window, filled: int) -> int:
        """Copy documents from a token of the row on, until their chapter or the window ends. Returns the tokens that
        the window has then."""
        key = self.chapter_at(position)
        chapter = self.chapter(key)
        order = self.orders.get(key)
        inside = position - chapter.begin
        document = int(np.searchsorted(order.ends, inside, side="right"))
        size = len(window.ids)
        while filled < size and document < len(order.ends):
            end = int(order.ends[document])
            first = int(order.firsts[document])
            length = int(order.lengths[document])
            left = end - inside
            skipped = length - left
            count = min(left, size - filled)
            number = int(order.shards[document])
            shard = self.shards.get(number)
            start = first + skipped
            stop = start + count
            here = slice(filled, filled + count)
            window.ids[here] = shard.read(start, stop)
            window.begins[here] = max(0, filled - skipped)
            if window.mask is not None:
                window.mask[here] = shard.read_mask(start, stop)
            filled += count
            inside += count
            document += 1
        return filled

    def document_end(self, position: int) -> int:
        """Where the document of a token of the row ends."""
        key = self.chapter_at(position)
        begin = self.chapter(key).begin
        ends = self.orders.get(key).ends
        document = np.searchsorted(ends, position - begin, side="right")
        return begin + int(ends[document])

    def documents(self, start: int, end: int) -> list[DocumentId]:
        """The documents that have tokens of the row from `start` to before `end`, in its order."""
        found: list[DocumentId] = []
        while start < end:
            key = self.chapter_at(start)
            chapter = self.chapter(key)
            order = self.orders.get(key)
            last = min(end, chapter.end) - 1
            inside = np.asarray((start, last)) - chapter.begin
            first_document, last_document = np.searchsorted(order.ends, inside, side="right").tolist()
            for document in range(first_document, last_document + 1):
                found.append(self.document_id(order, document))
            start = chapter.end
        return found

    def document_id(self, order: ChapterOrder, document: int) -> DocumentId:
        shard = int(order.shards[document])
        bounds = self.shards.get(shard).bounds
        number = np.searchsorted(bounds, order.firsts[document])
        folder = self.places[shard].folder
        return DocumentId(str(folder), self.first_documents[shard] + int(number))

    def has_mask(self, position: int) -> bool:
        """Whether the document of a token of the row has a mask of trained tokens."""
        key = self.chapter_at(position)
        begin = self.chapter(key).begin
        order = self.orders.get(key)
        document = np.searchsorted(order.ends, position - begin, side="right")
        shard = int(order.shards[document])
        return self.places[shard].has_mask

    def cut_samples(self, seq_len: int) -> CutSamples:
        """Of shards with masks. Bounds are read of all of them, masks of what is cut."""
        numbers = [number for number, place in enumerate(self.places) if place.has_mask]
        return sum_cuts(self.cuts_of_shard(number, seq_len) for number in numbers)

    def cuts_of_shard(self, number: int, seq_len: int) -> CutSamples:
        shard = self.shards.get(number)
        return count_cuts(shard.bounds, shard.read_mask, seq_len)

    def chapter(self, key: ChapterKey) -> Chapter:
        plan = self.epochs.get(key.epoch)
        return plan.chapters[key.number]

    def chapter_at(self, token: int) -> ChapterKey:
        """The chapter that holds a token of the row."""
        epoch = token // self.tokens
        plan = self.epochs.get(epoch)
        number = bisect_right(plan.ends, token)
        return ChapterKey(epoch, number)

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """The chapters of an epoch: shards in random order, cut where there are enough tokens or documents."""
        chapters: list[Chapter] = []
        order = shuffled_order(len(self.places), *self.keys, SHARDS_KEY, epoch)
        begin = epoch * self.tokens
        epoch_end = begin + self.tokens
        end = begin
        documents = 0
        shards: list[int] = []
        for shard in order.tolist():
            facts = self.places[shard].facts
            shards.append(shard)
            end += facts.tokens
            documents += facts.documents
            has_tokens = end - begin >= CHAPTER_TOKENS
            has_documents = documents >= CHAPTER_DOCUMENTS
            if has_tokens or has_documents or end == epoch_end:
                chapter = Chapter(begin, end, shards)
                chapters.append(chapter)
                begin = end
                documents = 0
                shards = []
        ends = [chapter.end for chapter in chapters]
        return EpochPlan(chapters, ends)

    def shuffle_documents(self, key: ChapterKey) -> ChapterOrder:
        shards: list[np.ndarray] = []
        firsts: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        for shard in self.chapter(key).shards:
            bounds = self.shards.get(shard).bounds
            shard_firsts = bounds[:-1]
            firsts.append(shard_firsts)
            shard_lengths = np.diff(bounds)
            lengths.append(shard_lengths)
            numbers = np.full(len(shard_firsts), shard, dtype=np.int32)
            shards.append(numbers)
        in_order = [np.concatenate(parts) for parts in (shards, firsts, lengths)]
        count = len(in_order[0])
        order = shuffled_order(count, *self.keys, DOCUMENTS_KEY, *key)
        shard_numbers, document_firsts, document_lengths = (values[order] for values in in_order)
        ends = np.cumsum(document_lengths)
        return ChapterOrder(shard_numbers, document_firsts, document_lengths, ends)
