"""Values of a mapped piece: read from a Hugging Face tensor into ours, and written back."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from moefold.checkpoint.format.boxes import Box, Range, box_overlap, box_slices
from moefold.checkpoint.hf.name_table import DimGroup, MappedPiece, flat_letters

FetchBox = Callable[[str, Box], torch.Tensor]  # a box of the tensor of that name


def read_piece_values(piece: MappedPiece, box: Box, fetch: FetchBox) -> tuple[Box, torch.Tensor] | None:
    """The part of a box of our tensor that this piece covers, and its values; None if there is no such part. No more
    of their tensor is fetched than needed."""
    shared = box_overlap(piece.box_in_ours, box)
    if shared is None:
        return None
    wanted, remaining = letter_ranges(piece, shared)
    their_box = tuple(their_range(piece, group, wanted) for group in piece.their_groups)
    theirs = split_their_dims(piece, wanted, fetch(piece.theirs, their_box))
    # Reorder the letters, and join those that are one dim of ours.
    letters = flat_letters(piece.their_groups)
    ours = theirs.permute([letters.index(letter) for letter in flat_letters(piece.our_groups)])
    our_sizes = [prod(wanted[letter][1] for letter in group) for group in piece.our_groups]
    return shared, ours.reshape(our_sizes)[box_slices(remaining)]


def split_their_dims(piece: MappedPiece, wanted: dict[str, Range], theirs: torch.Tensor) -> torch.Tensor:
    """A fetched box of their tensor with one dim per letter, cut to the wanted ranges."""
    letters = flat_letters(piece.their_groups)
    outermost = {group[0] for group in piece.their_groups}  # fetched as wanted; inner letters are fetched whole
    sizes: list[int] = []
    for letter in letters:
        sizes.append(wanted[letter][1] if letter in outermost else piece.sizes[letter])
    theirs = theirs.reshape(sizes)
    for dim, letter in enumerate(letters):
        if letter not in outermost:
            theirs = theirs.narrow(dim, *wanted[letter])
        if letter == piece.deinterleave:
            theirs = deinterleave_pairs(theirs, dim)
    return theirs


def letter_ranges(piece: MappedPiece, shared: Box) -> tuple[dict[str, Range], Box]:
    """The range to take of every letter, and the cut of our dims that remains to be made. A dim of ours that is one
    letter, not deinterleaved, is cut on their side already."""
    wanted = {letter: piece.letter_range(letter) for letter in flat_letters(piece.their_groups)}
    remaining: list[Range] = []
    for group, our_range, shared_range in zip(piece.our_groups, piece.box_in_ours, shared, strict=True):
        start, size = shared_range
        offset = start - our_range[0]
        if len(group) == 1 and group[0] != piece.deinterleave:
            letter = group[0]
            wanted[letter] = (wanted[letter][0] + offset, size)
            remaining.append((0, size))
        else:
            remaining.append((offset, size))
    return wanted, tuple(remaining)


def their_range(piece: MappedPiece, group: DimGroup, wanted: dict[str, Range]) -> Range:
    """The range of their dim that covers the wanted ranges: of its outermost letter a range, all of the others."""
    start, size = wanted[group[0]]
    inner = prod(piece.sizes[letter] for letter in group[1:])
    return start * inner, size * inner


def write_piece_values(piece: MappedPiece, values: torch.Tensor, theirs: torch.Tensor) -> None:
    """Write the values of the piece's box of our tensor to its box of theirs, which is contiguous."""
    our_letters = flat_letters(piece.our_groups)
    letters = flat_letters(piece.their_groups)
    split = values.reshape([piece.letter_size(letter) for letter in our_letters])
    split = split.permute([our_letters.index(letter) for letter in letters])
    target = theirs.view([piece.sizes[letter] for letter in letters])
    for dim, letter in enumerate(letters):
        target = target.narrow(dim, *piece.letter_range(letter))
        if letter == piece.deinterleave:
            split = interleave_halves(split, dim)
    target.copy_(split)


def deinterleave_pairs(x: torch.Tensor, dim: int) -> torch.Tensor:
    """a0 b0 a1 b1 -> a0 a1 b0 b1."""
    pairs = x.unflatten(dim, (-1, 2))
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)


def interleave_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """a0 a1 b0 b1 -> a0 b0 a1 b1."""
    halves = x.unflatten(dim, (2, -1))
    return halves.transpose(dim, dim + 1).flatten(dim, dim + 1)
