"""Values of a mapped piece: read from a Hugging Face tensor into ours, and written back."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from moefold.checkpoint.format.boxes import Box, Range, box_overlap, box_slices, relative_box
from moefold.checkpoint.hf.name_table import DimGroup, DimGroups, MappedPiece, flat_letters

FetchBox = Callable[[str, Box], torch.Tensor]  # a box of the tensor of that name


def read_piece_values(piece: MappedPiece, box: Box, fetch: FetchBox) -> tuple[Box, torch.Tensor] | None:
    """The part of a box of our tensor that this piece covers, and its values; None if there is no such part. No more
    of their tensor is fetched than needed."""
    shared = box_overlap(piece.box_in_ours, box)
    if shared is None:
        return None
    wanted, remaining = letter_ranges(piece, shared)
    their_ranges = [their_range(piece, group, wanted) for group in piece.their_groups]
    fetched = fetch(piece.theirs, tuple(their_ranges))
    theirs = split_their_dims(piece, wanted, fetched)
    # Reorder the letters, and join those that are one dim of ours.
    ours = permute_letters(theirs, piece.their_groups, piece.our_groups)
    our_sizes: list[int] = []
    for group in piece.our_groups:
        letter_sizes = [wanted[letter][1] for letter in group]
        our_sizes.append(prod(letter_sizes))
    values = ours.reshape(our_sizes)
    return shared, values[box_slices(remaining)]


def permute_letters(x: torch.Tensor, source: DimGroups, target: DimGroups) -> torch.Tensor:
    """A tensor with one dim per letter of `source`, permuted to the order of the letters of `target`."""
    letters = flat_letters(source)
    order = map(letters.index, flat_letters(target))
    return x.permute(*order)


def split_their_dims(piece: MappedPiece, wanted: dict[str, Range], theirs: torch.Tensor) -> torch.Tensor:
    """A fetched box of their tensor with one dim per letter, cut to the wanted ranges."""
    letters = flat_letters(piece.their_groups)
    # Outermost letters of a dim are fetched as wanted, inner ones whole.
    fetched = dict(piece.sizes)
    inner = set(letters)
    for outermost, *_ in piece.their_groups:
        fetched[outermost] = wanted[outermost][1]
        inner.remove(outermost)
    shape = [fetched[letter] for letter in letters]
    theirs = theirs.reshape(shape)
    for dim, letter in enumerate(letters):
        if letter in inner:
            theirs = theirs.narrow(dim, *wanted[letter])
        if letter == piece.deinterleave:
            theirs = deinterleave_pairs(theirs, dim)
    return theirs


def letter_ranges(piece: MappedPiece, shared: Box) -> tuple[dict[str, Range], Box]:
    """The range to take of every letter, and the cut of our dims that remains to be made. A dim of ours that is one
    letter, not deinterleaved, is cut on their side already."""
    letters = flat_letters(piece.their_groups)
    wanted = {letter: piece.letter_range(letter) for letter in letters}
    remaining = list(relative_box(shared, piece.box_in_ours))
    for dim, group in enumerate(piece.our_groups):
        is_one_letter = len(group) == 1
        if not is_one_letter or group[0] == piece.deinterleave:
            continue
        (letter,) = group
        offset, size = remaining[dim]
        start, _ = wanted[letter]
        wanted[letter] = (start + offset, size)
        remaining[dim] = (0, size)
    return wanted, tuple(remaining)


def their_range(piece: MappedPiece, group: DimGroup, wanted: dict[str, Range]) -> Range:
    """The range of their dim that covers the wanted ranges: of its outermost letter a range, all of the others."""
    outermost, *inner = group
    start, size = wanted[outermost]
    inner_size = prod(piece.sizes[letter] for letter in inner)
    return start * inner_size, size * inner_size


def write_piece_values(piece: MappedPiece, values: torch.Tensor, theirs: torch.Tensor) -> None:
    """Write the values of the piece's box of our tensor to its box of theirs, which is contiguous."""
    our_letters = flat_letters(piece.our_groups)
    letters = flat_letters(piece.their_groups)
    sizes = list(map(piece.letter_size, our_letters))
    split = values.reshape(sizes)
    split = permute_letters(split, piece.our_groups, piece.their_groups)
    whole_shape = [piece.sizes[letter] for letter in letters]
    target = theirs.view(whole_shape)
    for dim, letter in enumerate(letters):
        start, size = piece.letter_range(letter)
        target = target.narrow(dim, start, size)
        if letter == piece.deinterleave:
            split = interleave_halves(split, dim)
    target.copy_(split)


def deinterleave_pairs(x: torch.Tensor, dim: int) -> torch.Tensor:
    """a0 b0 a1 b1 -> a0 a1 b0 b1."""
    pairs = x.unflatten(dim, (-1, 2))
    halves = pairs.transpose(dim, dim + 1)
    return halves.flatten(dim, dim + 1)


def interleave_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """a0 a1 b0 b1 -> a0 b0 a1 b1."""
    halves = x.unflatten(dim, (2, -1))
    pairs = halves.transpose(dim, dim + 1)
    return pairs.flatten(dim, dim + 1)
