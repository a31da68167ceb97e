"""Delayed scales of many operands, made in one pass over their windows: once a step, and kept until windows change.

An expert or a channel that had no value other than zero in all these steps has the scale of what it is a part of: a
channel that of its expert, an expert that of the operand's expert with the largest values.

H steps, O operands, T experts of all operands, C channels of all operands on which the same ranks agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.delayed_tiles import DelayedScales
from moefold.kernels.quantise.fp8 import ScaleRule, scale_from_amax
from moefold.layout.axes import Axis
from moefold.layout.weight_copies import cached_copy
from moefold.precision.maxima_windows import MaximaWindow, last_of_neighbours


class OperandWindows(NamedTuple):
    """Windows of one operand: of all its experts, of which `held` lie on this rank, and of channels of the latter."""

    experts: MaximaWindow
    held: slice
    channels: MaximaWindow | None


class TableKind(NamedTuple):
    """What operands of one table have in common. `room`: what largest magnitudes are multiplied by."""

    rule: ScaleRule
    room: float


class ChannelScales(NamedTuple):
    """Channels on which the ranks of one axis agree. `expert_C`: the number of each one's expert in the table."""

    last_HC: Tensor
    expert_C: Tensor
    scales_C: Tensor


class ScaleTable:
    """The scales of operands. Their memory stays, and every operand has views of it."""

    def __init__(self, kind: TableKind, operands: Sequence[OperandWindows]):
        self.kind = kind
        experts = [operand.experts for operand in operands]
        self.last_HT = last_of_neighbours(experts)
        counts = [window.now.numel() for window in experts]
        self.operand_T = numbers_repeated(counts, self.last_HT.device)
        self.operands = len(operands)
        self.rows_T = torch.empty_like(self.last_HT[0])
        self.channels: list[ChannelScales] = []
        held_T = torch.arange(len(self.rows_T), device=self.last_HT.device)
        rows = self.rows_T.split(counts)
        numbers = held_T.split(counts)
        rows_of = [rows_E[operand.held] for rows_E, operand in zip(rows, operands, strict=True)]
        held_of = [number_E[operand.held] for number_E, operand in zip(numbers, operands, strict=True)]
        columns_of = self.open_channels(operands, held_of)
        self.scales: list[DelayedScales] = []
        for number, rows_e in enumerate(rows_of):
            rows_e1 = rows_e[:, None]
            columns_eC = columns_of.get(number, rows_e1)
            self.scales.append(DelayedScales(rows_e1, columns_eC))

    def open_channels(self, operands: Sequence[OperandWindows], held_of: Sequence[Tensor]) -> dict[int, Tensor]:
        """Make room for the scales of channels; those of each operand that keeps them, by its number."""
        by_axis = defaultdict[Axis, list[int]](list)
        for number, operand in enumerate(operands):
            if operand.channels is not None:
                by_axis[operand.channels.axis].append(number)
        columns_of: dict[int, Tensor] = {}
        for numbers in by_axis.values():
            windows = [channels for number in numbers if (channels := operands[number].channels) is not None]
            last_HC = last_of_neighbours(windows)
            scales_C = torch.empty_like(last_HC[0])
            counts = [window.now.numel() for window in windows]
            experts: list[Tensor] = []
            for number, scales_c in zip(numbers, scales_C.split(counts), strict=True):
                held_e = held_of[number]
                columns_of[number] = scales_c.view(len(held_e), -1)
                experts.append(held_e.repeat_interleave(len(scales_c) // len(held_e)))
            expert_C = torch.cat(experts).int()
            self.channels.append(ChannelScales(last_HC, expert_C, scales_C))
        return columns_of

    def scales_of(self, number: int) -> DelayedScales:
        """Those of an operand by its number, from the last steps alone."""
        scales = cached_copy(self.last_HT, self.kind, self.make_scales)
        return scales[number]

    def make_scales(self, last_HT: Tensor) -> list[DelayedScales]:
        rule, room = self.kind
        seen_T = last_HT.amax(0)
        none_O = seen_T.new_zeros(self.operands)
        most_O = none_O.scatter_reduce(0, self.operand_T, seen_T, "amax")
        most_T = seen_or(seen_T, most_O[self.operand_T])
        scales_T = scale_from_amax(most_T * room, rule)
        self.rows_T.copy_(scales_T)
        for last_HC, expert_C, scales_C in self.channels:
            seen_C = last_HC.amax(0)
            of_expert_C = most_T.index_select(0, expert_C)
            most_C = seen_or(seen_C, of_expert_C)
            scales_C.copy_(scale_from_amax(most_C * room, rule))
        return self.scales


def seen_or(seen: Tensor, other: Tensor) -> Tensor:
    """What was seen, and the other value in the place of zeros."""
    return torch.where(seen == 0, other, seen)


def numbers_repeated(counts: Sequence[int], device: torch.device) -> Tensor:
    """0, 1, 2, ... as often as the counts say."""
    repeats = torch.tensor(counts)
    numbers = torch.arange(len(counts))
    return numbers.repeat_interleave(repeats).to(device)
