"""Rows of experts in blocks along the tokens, for column copies in small blocks: each expert's rows fill blocks of
`height` rows, the last one with zeros.

R rows sorted by expert, P padded rows in B blocks of K rows, E experts, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowBlocks(NamedTuple):
    """`ends_E`: where each expert's padded rows end. `expert_R`: the expert of each row, E for none. `place_R`: the
    padded place of each row, P for rows without an expert. `expert_B`: the expert of each block."""

    ends_E: Tensor
    expert_R: Tensor
    place_R: Tensor
    expert_B: Tensor


def row_blocks(ends_E: Tensor, rows: int, height: int) -> RowBlocks:
    """B is an upper bound that depends on shapes alone, so that nothing waits for the device."""
    experts = len(ends_E)
    blocks = (rows + experts * (height - 1)) // height
    ends = ends_E.long()
    rows_E = ends.diff(prepend=ends.new_zeros(1))
    blocks_E = (rows_E + height - 1) // height
    padded_ends_E = blocks_E.cumsum(0) * height
    first_E = padded_ends_E - blocks_E * height
    row_R = torch.arange(rows, device=ends.device)
    expert_R = expert_of_rows(ends_E, rows)
    held_R = expert_R.clamp(max=experts - 1)
    begin_R = (ends - rows_E)[held_R]
    place_R = first_E[held_R] + row_R - begin_R
    place_R = torch.where(expert_R < experts, place_R, blocks * height)
    row_B = torch.arange(blocks, device=ends.device) * height
    expert_B = torch.searchsorted(padded_ends_E, row_B, right=True).clamp(max=experts - 1)
    return RowBlocks(padded_ends_E.int(), expert_R, place_R, expert_B)


def expert_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """The expert of each row; E for rows behind the last end."""
    row_R = torch.arange(rows, device=ends_E.device)
    return torch.searchsorted(ends_E.long(), row_R, right=True)


def rows_to_blocks(x_RD: Tensor, blocks: RowBlocks, height: int) -> Tensor:
    """(B, D, K): each block transposed, so that the values of a column lie together."""
    padded = len(blocks.expert_B) * height
    x_PD = x_RD.new_zeros(padded + 1, x_RD.shape[1])
    x_PD[blocks.place_R] = x_RD
    x_BKD = x_PD[:padded].unflatten(0, (-1, height))
    return x_BKD.mT


def blocks_to_rows(x_BDK: Tensor) -> Tensor:
    """(P, D): rows in their padded places."""
    return x_BDK.mT.flatten(0, 1)


def largest_by_expert(amax_B: Tensor, expert_B: Tensor, experts: int) -> Tensor:
    """The largest magnitude of each expert from those of its blocks or rows; an expert number beyond the last counts
    nowhere."""
    most = amax_B.new_zeros(experts + 1)
    return most.scatter_reduce(0, expert_B, amax_B, "amax")[:experts]
