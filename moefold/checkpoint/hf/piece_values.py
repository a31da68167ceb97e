"""Move values between our tensors and theirs, along a piece."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from moefold.checkpoint.format.boxes import Range, box_overlap, box_slices
from moefold.checkpoint.hf.name_table import MappedPiece

FetchBox = Callable[[str, tuple[Range, ...]], torch.Tensor]  # a box of the tensor of that name


def read_piece_values(
    piece: MappedPiece, box: tuple[Range, ...], fetch: FetchBox
) -> tuple[tuple[Range, ...], torch.Tensor] | None:
    """Which part of a box of our tensor this piece has, and its values; no more of theirs is fetched than needed."""
    shared = box_overlap(piece.box_in_ours, box)
    if shared is None:
        return None
    wanted, rest = letter_ranges(piece, shared)
    theirs = fetch(piece.theirs, tuple(their_range(piece, group, wanted) for group in piece.their_groups))
    letters = [x for group in piece.their_groups for x in group]
    outer = {group[0] for group in piece.their_groups}
    theirs = theirs.reshape([wanted[x][1] if x in outer else piece.sizes[x] for x in letters])
    for dim, x in enumerate(letters):
        start, size = wanted[x]
        theirs = theirs if x in outer else theirs.narrow(dim, start, size)
        theirs = deinterleave_pairs(theirs, dim) if x == piece.halves else theirs
    ordered = theirs.permute([letters.index(x) for group in piece.our_groups for x in group])
    joined = ordered.reshape([prod(wanted[x][1] for x in group) for group in piece.our_groups])
    return shared, joined[box_slices(rest)]


def letter_ranges(piece: MappedPiece, shared: tuple[Range, ...]) -> tuple[dict[str, Range], tuple[Range, ...]]:
    """What to take of every letter, and what of our dims is then left to cut. A dim of ours that is one letter, and no
    halves, is cut on their side already."""
    wanted = {x: piece.letter_range(x) for group in piece.their_groups for x in group}
    rest: list[Range] = []
    for group, (begin, _), (start, size) in zip(piece.our_groups, piece.box_in_ours, shared, strict=True):
        if len(group) == 1 and group[0] != piece.halves:
            wanted[group[0]] = (wanted[group[0]][0] + start - begin, size)
            rest.append((0, size))
        else:
            rest.append((start - begin, size))
    return wanted, tuple(rest)


def their_range(piece: MappedPiece, group: tuple[str, ...], wanted: dict[str, Range]) -> Range:
    """The range of their dim that holds what is wanted: a range of its outermost letter, all of the others."""
    start, size = wanted[group[0]]
    inner = prod(piece.sizes[x] for x in group[1:])
    return start * inner, size * inner


def write_piece_values(piece: MappedPiece, values: torch.Tensor, theirs: torch.Tensor) -> None:
    """Write the values of the piece's whole box of our tensor to their place in theirs, which is contiguous."""
    ours = [x for group in piece.our_groups for x in group]
    letters = [x for group in piece.their_groups for x in group]
    split = values.reshape([piece.letter_range(x)[1] for x in ours]).permute([ours.index(x) for x in letters])
    place = theirs.view([piece.sizes[x] for x in letters])
    for dim, x in enumerate(letters):
        place = place.narrow(dim, *piece.letter_range(x))
        split = interleave_halves(split, dim) if x == piece.halves else split
    place.copy_(split)


def deinterleave_pairs(x: torch.Tensor, dim: int) -> torch.Tensor:
    """a0 b0 a1 b1 -> a0 a1 b0 b1."""
    return x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def interleave_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """a0 a1 b0 b1 -> a0 b0 a1 b1."""
    return x.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)
