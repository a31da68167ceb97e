"""A piece is a box of one of our tensors that is also a box of a Hugging Face tensor, with dims split, reordered and
joined. Torch-free.

A family's table is a list of pieces, read in both directions: each rank reads only the pieces, and of each only the
part, that it holds; on the way out every Hugging Face tensor is put together from its pieces.

    Piece("...q_proj.weight", "blocks.0.attention.query.weight", "(h x) d -> h x d", {"h": 4, "x": 16, "d": 64})

Letters are dims, those in brackets are one dim on that side, the first outermost. A `1` is a dim that only ours has.
`cut` takes a range of a letter on their side, `at` says where the piece begins in ours, and `halves` names a letter
whose pairs lie next to each other on their side (0 1 2 3) and half the range apart on ours (0 2 1 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from moefold.checkpoint.format.boxes import Range

DimGroups = tuple[tuple[str, ...], ...]


def parse_dim_groups(side: str) -> DimGroups:
    """`(h x) d` -> (("h", "x"), ("d",)); a `1` is an empty group."""
    words = re.findall(r"\(([^)]*)\)|(\S+)", side)
    return tuple(tuple(inside.split()) if inside else () if one == "1" else (one,) for inside, one in words)


@dataclass(frozen=True)
class MappedPiece:
    theirs: str
    ours: str
    pattern: str
    sizes: Mapping[str, int]  # of every letter, over the whole of their tensor
    cut: Mapping[str, Range] = field(default_factory=dict[str, Range])
    at: tuple[int, ...] = ()
    halves: str = ""

    @cached_property
    def their_groups(self) -> DimGroups:
        return parse_dim_groups(self.pattern.split("->")[0])

    @cached_property
    def our_groups(self) -> DimGroups:
        return parse_dim_groups(self.pattern.split("->")[1])

    @property
    def their_shape(self) -> tuple[int, ...]:
        return tuple(prod(self.sizes[x] for x in group) for group in self.their_groups)

    def letter_range(self, letter: str) -> Range:
        """What this piece takes of a letter on their side."""
        return self.cut.get(letter, (0, self.sizes[letter]))

    @cached_property
    def box_in_ours(self) -> tuple[Range, ...]:
        """Where the piece lies in our tensor."""
        begins = self.at or (0,) * len(self.our_groups)
        sizes = (prod(self.letter_range(x)[1] for x in group) for group in self.our_groups)
        return tuple(zip(begins, sizes, strict=True))


@dataclass(frozen=True)
class TensorAlias:
    """Another name under which their files may hold a tensor once more. It must be equal to that tensor; `written` says
    whether we write it too."""

    theirs: str
    of: str
    written: bool


@dataclass(frozen=True)
class PlaceholderTensor:
    """A tensor that their model has and nothing comes of: it may be there, and is written as zeros."""

    theirs: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class NameTable:
    """One family's names for one model."""

    pieces: tuple[MappedPiece, ...]
    aliases: tuple[TensorAlias, ...] = ()
    placeholders: tuple[PlaceholderTensor, ...] = ()

    @cached_property
    def pieces_by_theirs(self) -> dict[str, list[MappedPiece]]:
        return group_pieces((piece.theirs, piece) for piece in self.pieces)

    @cached_property
    def written(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that is written, in order."""
        sources = {name: name for name in self.pieces_by_theirs} | {
            twin.theirs: twin.of for twin in self.aliases if twin.written
        }
        shapes = {name: self.pieces_by_theirs[source][0].their_shape for name, source in sources.items()}
        return shapes | {blank.theirs: blank.shape for blank in self.placeholders}

    @cached_property
    def pieces_by_ours(self) -> dict[str, list[MappedPiece]]:
        return group_pieces((piece.ours, piece) for piece in self.pieces)


def group_pieces(pairs: Iterable[tuple[str, MappedPiece]]) -> dict[str, list[MappedPiece]]:
    found: dict[str, list[MappedPiece]] = {}
    for name, piece in pairs:
        found.setdefault(name, []).append(piece)
    return found
