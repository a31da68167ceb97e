"""Name tables: which box of our tensor is which box of a Hugging Face tensor. Torch-free.

A table is a list of pieces. A piece maps a box of one of their tensors to a box of one of ours, with dims split,
reordered and joined. The list is read in both directions: on import each rank reads only the pieces, and of each piece
only the part, that it holds; on export every Hugging Face tensor is joined from its pieces.

    MappedPiece("...q_proj.weight", "blocks.0.attention.query.weight", "(h x) d -> h x d", {"h": 4, "x": 16, "d": 64})

Letters are dims; letters in brackets are one dim on that side, the first outermost. A `1` is a dim that only ours has.
`cut` takes a range of a letter on their side, and `corner` is where the piece begins in our tensor. `deinterleave`
names a letter whose pairs are adjacent on their side (0 1 2 3) and half the range apart on ours (0 2 1 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from moefold.checkpoint.format.boxes import Box, Range

DimGroup = tuple[str, ...]
DimGroups = tuple[DimGroup, ...]


def parse_dim_groups(side: str) -> DimGroups:
    """`(h x) d` -> (("h", "x"), ("d",)); a `1` is an empty group."""
    groups: list[DimGroup] = []
    for bracketed, single in re.findall(r"\(([^)]*)\)|(\S+)", side):
        if bracketed:
            groups.append(tuple(bracketed.split()))
        elif single == "1":
            groups.append(())
        else:
            groups.append((single,))
    return tuple(groups)


def flat_letters(groups: DimGroups) -> list[str]:
    return [letter for group in groups for letter in group]


@dataclass(frozen=True)
class MappedPiece:
    theirs: str
    ours: str
    pattern: str
    sizes: Mapping[str, int]  # of every letter, over the whole of their tensor
    cut: Mapping[str, Range] = field(default_factory=dict[str, Range])
    corner: tuple[int, ...] = ()
    deinterleave: str = ""

    @cached_property
    def their_groups(self) -> DimGroups:
        return parse_dim_groups(self.pattern.split("->")[0])

    @cached_property
    def our_groups(self) -> DimGroups:
        return parse_dim_groups(self.pattern.split("->")[1])

    @property
    def their_shape(self) -> tuple[int, ...]:
        shape: list[int] = []
        for group in self.their_groups:
            letter_sizes = [self.sizes[letter] for letter in group]
            shape.append(prod(letter_sizes))
        return tuple(shape)

    def letter_range(self, letter: str) -> Range:
        """The range of a letter, on their side, that this piece covers."""
        whole = (0, self.sizes[letter])
        return self.cut.get(letter, whole)

    def letter_size(self, letter: str) -> int:
        return self.letter_range(letter)[1]

    @cached_property
    def box_in_ours(self) -> Box:
        """The box of our tensor that the piece covers."""
        origin = (0,) * len(self.our_groups)
        corner = self.corner or origin
        sizes: list[int] = []
        for group in self.our_groups:
            letter_sizes = map(self.letter_size, group)
            sizes.append(prod(letter_sizes))
        return tuple(zip(corner, sizes, strict=True))

    def with_inputs(self, size: int) -> MappedPiece:
        """The piece of a matrix with the same outputs and so many inputs, as an adapter's B has."""
        ((inputs,),) = self.our_groups[-1:]
        return replace(self, sizes={**self.sizes, inputs: size})


@dataclass(frozen=True)
class TensorAlias:
    """A second name under which their files may hold the tensor `of`, with equal values. `written`: an export writes
    it too."""

    theirs: str
    of: str
    written: bool


@dataclass(frozen=True)
class PlaceholderTensor:
    """A tensor of their model without any effect: it may be in their files, and is written as zeros."""

    theirs: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class NameTable:
    """The names of one family for one model."""

    pieces: tuple[MappedPiece, ...]
    aliases: tuple[TensorAlias, ...] = ()
    placeholders: tuple[PlaceholderTensor, ...] = ()

    @cached_property
    def pieces_by_theirs(self) -> dict[str, list[MappedPiece]]:
        return group_pieces((piece.theirs, piece) for piece in self.pieces)

    @cached_property
    def pieces_by_ours(self) -> dict[str, list[MappedPiece]]:
        return group_pieces((piece.ours, piece) for piece in self.pieces)

    @cached_property
    def written(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of an export, in order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in self.pieces:
            shapes.setdefault(piece.theirs, piece.their_shape)
        for alias in self.aliases:
            if alias.written:
                shapes[alias.theirs] = shapes[alias.of]
        for placeholder in self.placeholders:
            shapes[placeholder.theirs] = placeholder.shape
        return shapes

    def source_pieces(self, name: str) -> list[MappedPiece]:
        """The pieces of one of their tensors, or of the tensor that it is an alias of; none for a placeholder."""
        for alias in self.aliases:
            if alias.theirs == name:
                name = alias.of
        return self.pieces_by_theirs.get(name, [])


def group_pieces(pairs: Iterable[tuple[str, MappedPiece]]) -> dict[str, list[MappedPiece]]:
    groups: dict[str, list[MappedPiece]] = {}
    for name, piece in pairs:
        groups.setdefault(name, []).append(piece)
    return groups
