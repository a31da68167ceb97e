"""Attention of which a document's bits do not depend on its batch (`kernels.invariant`).

Each document is computed by itself: its queries in tiles, from its first position on, and for each tile the keys up to
it, in tiles too. All products have one shape, and sums one order, which depends on the place in the document alone:
not on other sequences, on documents beside it, or on what follows. Plain torch, one call for each pair of tiles.

B sequences, S queries, which are the last of L positions, H query heads, G key/value heads, D head width, V of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64
Tiles = tuple[Tensor, ...]


class Document(NamedTuple):
    """Positions `first` to `last` of a sequence, the last one excluded."""

    sequence: int
    first: int
    last: int


def documents_of(keys: int, sequences: int, begins_BS: Tensor | None) -> Iterator[Document]:
    """The documents of a batch, as far as queries see them; waits for the device where there are borders."""
    if begins_BS is None:
        for sequence in range(sequences):
            yield Document(sequence, 0, keys)
        return
    lists = begins_BS.tolist()
    for sequence, begins in enumerate(lists):
        borders = sorted({*begins, keys})
        for first, last in pairwise(borders):
            yield Document(sequence, first, last)


class DocumentAttention(NamedTuple):
    """What all documents of a call have in common. `sink_H` as wide as the scores."""

    scale: float
    window: int
    sink_H: Tensor | None

    def of_document(self, q_HND: Tensor, k_HND: Tensor, v_HNV: Tensor) -> Tensor:
        """(H, N, V) for N queries and keys at the same positions, from the document's first on."""
        length = q_HND.shape[1]
        query_tiles = tiles_of(q_HND)
        key_tiles = tiles_of(k_HND)
        value_tiles = tiles_of(v_HNV)
        results: list[Tensor] = []
        for number, q_tile in enumerate(query_tiles):
            seen = number + 1
            keys = key_tiles[:seen]
            values = value_tiles[:seen]
            result = self.of_tile(q_tile, keys, values)
            results.append(result)
        joined = torch.cat(results, 1)
        return joined[:, :length]

    def of_tile(self, q_HTD: Tensor, keys: Tiles, values: Tiles) -> Tensor:
        """One tile of queries, which is the last of the tiles of keys."""
        products = [q_HTD @ k_HTD.mT for k_HTD in keys]
        scores = torch.cat(products, -1)
        scores = scores * self.scale
        visible = self.visible(len(keys), scores.device)
        hidden = ~visible
        scores = scores.masked_fill(hidden, -torch.inf)
        sink_H = self.sink_H
        if sink_H is not None:
            sink_H11 = sink_H[:, None, None]
            column = sink_H11.expand(-1, TILE, 1)
            both = (scores, column)
            scores = torch.cat(both, -1)
        p = scores.softmax(-1)
        p_tiles = p.split(TILE, -1)
        # in order, from the first tile of keys on
        total = p_tiles[0] @ values[0]
        for i in range(1, len(values)):
            summand = p_tiles[i] @ values[i]
            total = total + summand
        return total

    def visible(self, tiles: int, device: torch.device) -> Tensor:
        """(64, 64 tiles): which keys the queries of the last tile see."""
        keys = tiles * TILE
        key = torch.arange(keys, device=device)
        query = key[-TILE:]
        distance = query[:, None] - key
        visible = distance >= 0
        if self.window:
            in_window = distance < self.window
            visible = visible & in_window
        return visible


def tiles_of(x_HND: Tensor) -> Tiles:
    """Tiles of positions, the last one filled up with zeros."""
    length = x_HND.shape[1]
    missing = -length % TILE
    padded = F.pad(x_HND, (0, 0, 0, missing))
    padded = padded.contiguous()
    return padded.split(TILE, 1)


def attend_by_document(
    q_BHSD: Tensor, k_BHLD: Tensor, v_BHLV: Tensor, attend: DocumentAttention, begins_BS: Tensor | None
) -> Tensor:
    """(B, H, S, V) in the dtype of the operands."""
    sequences, _, keys, _ = k_BHLD.shape
    queries = q_BHSD.shape[2]
    ahead = keys - queries
    q_BHLD = F.pad(q_BHSD, (0, 0, ahead, 0))
    results: list[list[Tensor]] = [[] for _ in range(sequences)]
    for document in documents_of(keys, sequences, begins_BS):
        sequence, first, last = document
        here = (sequence, slice(None), slice(first, last))
        q_HND = q_BHLD[here]
        k_HND = k_BHLD[here]
        v_HNV = v_BHLV[here]
        result = attend.of_document(q_HND, k_HND, v_HNV)
        results[sequence].append(result)
    of_queries = []
    for parts in results:
        joined_HLV = torch.cat(parts, 1)  # from the first position that a query sees
        y_HSV = joined_HLV[:, -queries:]
        of_queries.append(y_HSV)
    return torch.stack(of_queries)
