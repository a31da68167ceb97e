"""A rank's file of a checkpoint: its header, and where every chunk and every piece of a digest lies in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

from moefold.checkpoint.format.boxes import Box, box_sizes, element_count
from moefold.checkpoint.format.ledger import SAFETENSORS_DTYPES, PieceDigests, TensorSpec
from moefold.checkpoint.format.reader import chunk_name
from moefold.checkpoint.format.safetensors_header import HeaderEntry, encode_safetensors_header
from moefold.checkpoint.format.write_plan import RankPlan, pieces_inside_box


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk and its first byte."""

    name: str
    box: Box
    spec: TensorSpec
    begin: int

    @property
    def end(self) -> int:
        size = element_count(self.box) * self.spec.itemsize
        return self.begin + size


class PieceSpan(NamedTuple):
    """A piece of a tensor, by its first element, and the bytes of the file that it covers."""

    name: str
    first: int
    begin: int
    end: int


class Span(Protocol):
    """Some bytes of a file."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...


S = TypeVar("S", bound=Span)


@dataclass(frozen=True)
class WrittenFile:
    """A file of tensors: its size, the digest of its header, and the digests of the pieces that it contains whole."""

    name: str
    bytes: int
    sha256: str
    digests: PieceDigests


class RankFile:
    """The file that a rank writes. Without chunks there is none: other ranks write all that this rank holds."""

    def __init__(self, plan: RankPlan, rank: int):
        self.name = rank_file_name(rank)
        behind_header = place_chunks(plan, 0)
        self.header = encode_chunk_header(behind_header)
        self.chunks = place_chunks(plan, len(self.header))
        self.size = self.chunks[-1].end if self.chunks else 0

    @cached_property
    def pieces(self) -> list[PieceSpan]:
        """The pieces that the file contains whole, in its order."""
        spans: list[PieceSpan] = []
        for chunk in self.chunks:
            itemsize = chunk.spec.itemsize
            for piece, offset in pieces_inside_box(chunk.box, chunk.spec):
                begin = chunk.begin + offset * itemsize
                size = (piece.last - piece.first) * itemsize
                span = PieceSpan(chunk.name, piece.first, begin, begin + size)
                spans.append(span)
        return spans


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def place_chunks(plan: RankPlan, first_byte: int) -> list[PlacedChunk]:
    """The chunks of a rank one behind the other."""
    chunks: list[PlacedChunk] = []
    position = first_byte
    for name, box in plan.chunks:
        spec = plan.specs[name]
        chunk = PlacedChunk(name, box, spec, position)
        chunks.append(chunk)
        position = chunk.end
    return chunks


def encode_chunk_header(chunks: Sequence[PlacedChunk]) -> bytes:
    entries: dict[str, object] = {}
    for chunk in chunks:
        code, _ = SAFETENSORS_DTYPES[chunk.spec.dtype]
        shape = tuple(box_sizes(chunk.box))
        entry = HeaderEntry(code, shape, chunk.begin, chunk.end)
        name = chunk_name(chunk.name, chunk.box)
        entries[name] = entry.as_json()
    return encode_safetensors_header(entries)


def spans_inside(spans: Sequence[S], begin: int, end: int) -> Iterator[tuple[S, int, int]]:
    """The spans, sorted and disjoint, that have some of the bytes begin..end, each with those that it has of them."""
    first = bisect_right(spans, begin, key=attrgetter("end"))
    for number in range(first, len(spans)):
        span = spans[number]
        if span.begin >= end:
            return
        yield span, max(span.begin, begin), min(span.end, end)
