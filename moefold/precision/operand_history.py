"""Histories of operands: the largest magnitudes of an input or a gradient in the last steps, and scales from these.

    experts     for each expert the largest magnitude of its rows; a dense layer is one expert
    channels    for each expert and channel, where copies along columns have scales of their own

Ranks agree on them at the end of a step (precision/scale_histories.py). An expert or a channel that had no value other
than zero in all these steps has the scale of what it is a part of: a channel that of its expert, an expert that of the
expert with the largest values.

H steps, E experts, e of them held here, C channels held here, P padded rows in M tiles, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.run import PrecisionConfig
from moefold.kernels.linear.product import Role
from moefold.kernels.quantise.fp8 import ScaleRule, scale_from_amax
from moefold.kernels.quantise.quantise_tiles import TileMaxima
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.quantise.wide_scales import (
    WideScales,
    maxima_of_experts,
    repeat_for_rows,
    scales_of_tiles,
)
from moefold.layout.axes import Axis, World
from moefold.layout.declare import Declaration, PartOfTensor
from moefold.layout.placement import Placement
from moefold.layout.weight_copies import cached_copy
from moefold.precision.linear import PlacedWeight

ExpertScales = tuple[Tensor, Tensor]  # (e, 1) along rows; (e, C) or (e, 1) along columns


class MaximaWindow:
    """Largest magnitudes of the last steps, `last` (H, ...), and of the step under way so far, `now`: this rank's part
    of the tensor that `declaration` describes, on which the ranks of `axis` agree."""

    def __init__(self, steps: int, declaration: Declaration, world: World, axis: Axis):
        self.declaration = declaration
        self.part = declaration.part(world)
        self.axis = axis
        sizes = [size for _, size in self.part]
        self.last = torch.zeros(steps, *sizes, device=world.device)
        self.now = torch.zeros(sizes, device=world.device)

    def state(self) -> PartOfTensor:
        steps = len(self.last)
        shape = (steps, *self.declaration.shape)
        return PartOfTensor(self.last, shape, [(0, steps), *self.part])


class OperandHistory:
    """The history of one operand of a product. `saturated`: values so far that were beyond the range of their scale,
    over all ranks; `saturated_now`: those of the step under way on this rank."""

    def __init__(self, weight: PlacedWeight, role: Role, options: PrecisionConfig, by_channel: bool):
        declaration, world = weight
        is_stacked = declaration.stacked
        experts = declaration.shape[0] if is_stacked else 1
        first, held = declaration.part(world)[0] if is_stacked else (0, 1)
        self.held = slice(first, first + held)
        whole = Declaration((experts,), Placement(declaration.placement.grid), std=0.0)
        self.experts = MaximaWindow(options.history, whole, world, world.dp_cp_tp)
        self.channels = None
        if by_channel:
            of_channels = declaration_of_channels(declaration, role)
            replicas = world.gradients_of(of_channels.placement)
            self.channels = MaximaWindow(options.history, of_channels, world, replicas)
        self.room = 2.0**options.margin
        self.saturated = torch.zeros(1, dtype=torch.int64, device=world.device)
        self.saturated_now = torch.zeros_like(self.saturated)

    @property
    def windows(self) -> list[MaximaWindow]:
        return [self.experts] if self.channels is None else [self.experts, self.channels]

    def state(self) -> dict[str, Tensor | PartOfTensor]:
        kept: dict[str, Tensor | PartOfTensor] = {"maxima": self.experts.last, "saturated": self.saturated}
        if self.channels is not None:
            kept["channel_maxima"] = self.channels.state()
        return kept

    def record(self, maxima: TileMaxima, tiles: RowTiles) -> None:
        """Take note of largest magnitudes in the step under way. Noted twice, they change nothing."""
        most_eC = maxima_of_experts(maxima.columns_MD, tiles)
        held_e = self.experts.now[self.held]
        torch.maximum(held_e, most_eC.amax(1), out=held_e)
        if self.channels is not None:
            now_eC = self.channels.now.view_as(most_eC)
            torch.maximum(now_eC, most_eC, out=now_eC)

    def scales(self, tiles: RowTiles, rule: ScaleRule, width: int) -> WideScales:
        """What `quantise_tiles` takes, from the last steps alone."""
        rows_e1, columns_eC = cached_copy(self.experts.last, rule, lambda _: self.expert_scales(rule))
        rows_M1 = scales_of_tiles(rows_e1, tiles)
        columns_MC = scales_of_tiles(columns_eC, tiles)
        return WideScales(repeat_for_rows(rows_M1), columns_MC.expand(-1, width).contiguous())

    def expert_scales(self, rule: ScaleRule) -> ExpertScales:
        """Made once a step, and kept until the history changes."""
        most_E = self.experts.last.amax(0)
        most_E = torch.where(most_E == 0, most_E.amax(), most_E)
        most_e1 = most_E[self.held, None]
        rows_e1 = scale_from_amax(most_e1 * self.room, rule)
        if self.channels is None:
            return rows_e1, rows_e1
        most_eC = self.channels.last.amax(0).view(len(most_e1), -1)
        most_eC = torch.where(most_eC == 0, most_e1, most_eC)
        return rows_e1, scale_from_amax(most_eC * self.room, rule)


def declaration_of_channels(weight: Declaration, role: Role) -> Declaration:
    """Experts and channels of a product's input, or of the gradient of its output: those dims of the weight."""
    last = len(weight.shape) - 1
    first = 1 if weight.stacked else 0
    channels = [last] if role == "input" else list(range(first, last))
    dims = [*range(first), *channels]
    shape = tuple(weight.shape[dim] for dim in dims)
    cut = tuple((dims.index(dim), axis) for dim, axis in weight.placement.cut if dim in dims)
    return Declaration(shape, Placement(weight.placement.grid, cut), std=0.0)
