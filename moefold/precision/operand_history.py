"""Histories of operands: the largest magnitudes of an input or a gradient in the last steps, and scales from these.

    experts     for each expert the largest magnitude of its rows; a dense layer is one expert
    channels    for each expert and channel, where copies along columns have scales of their own

Ranks agree on them at the end of a step (precision/scale_histories.py), and scales of all operands are made at once
(precision/scale_table.py).

E experts, e of them held here, C channels held here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.run import PrecisionConfig
from moefold.kernels.linear.product import Role
from moefold.kernels.quantise.delayed_tiles import DelayedScales
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.layout.declare import Declaration
from moefold.layout.placement import DimCuts, Placement
from moefold.precision.linear import PlacedWeight, RecipeTensors
from moefold.precision.maxima_windows import MaximaWindow
from moefold.precision.scale_table import OperandWindows, ScaleTable, TableKind


class OperandHistory:
    """The history of one operand of a product. `saturated`: values so far that were beyond the range of their scale,
    over all ranks; `saturated_now`: those of the step under way on this rank."""

    table: ScaleTable | None = None
    number = 0

    def __init__(
        self, weight: PlacedWeight, role: Role, options: PrecisionConfig, rule: ScaleRule, by_channel: bool
    ):  # fmt: skip
        declaration, world = weight
        steps = options.history
        self.held = held_experts(weight)
        whole = declaration_of_experts(declaration)
        everyone = world.dp_cp_tp
        self.experts = MaximaWindow(steps, whole, world, everyone)
        self.windows = [self.experts]
        self.channels = None
        if by_channel:
            of_channels = declaration_of_channels(declaration, role)
            replicas = world.gradients_of(of_channels.placement)
            self.channels = MaximaWindow(steps, of_channels, world, replicas)
            self.windows.append(self.channels)
        self.operand = OperandWindows(self.experts, self.held, self.channels)
        self.kind = TableKind(rule, 2.0**options.margin)
        device = world.device
        self.saturated = torch.zeros(1, dtype=torch.int64, device=device)
        self.saturated_now = torch.zeros_like(self.saturated)

    def state(self) -> RecipeTensors:
        kept: RecipeTensors = {}
        kept["maxima"] = self.experts.last
        kept["saturated"] = self.saturated
        if self.channels is not None:
            part = self.channels.state()
            kept["channel_maxima"] = part
        return kept

    def describes_as(self, other: OperandHistory) -> bool:
        """Whether the windows of both are parts of tensors that are alike."""
        mine, its = ([window.declaration for window in history.windows] for history in (self, other))
        return self.kind == other.kind and mine == its

    def seen_now(self) -> tuple[Tensor, Tensor | None]:
        """Where the step under way takes note: (e,) of experts, (e, C) of channels where these are kept."""
        now_e = self.experts.now[self.held]
        if self.channels is None:
            return now_e, None
        experts = len(now_e)
        now_eC = self.channels.now.view(experts, -1)
        return now_e, now_eC

    def join(self, table: ScaleTable, number: int) -> None:
        """Have scales made with those of other operands; `number`: of this one in the table."""
        self.table = table
        self.number = number

    def scales(self) -> DelayedScales:
        """Those of the last steps alone."""
        if self.table is None:
            table = ScaleTable(self.kind, [self.operand])
            self.join(table, 0)
            return table.scales_of(0)
        return self.table.scales_of(self.number)


def held_experts(weight: PlacedWeight) -> slice:
    """Those whose matrices lie on this rank."""
    declaration, world = weight
    if not declaration.stacked:
        return slice(0, 1)
    part = declaration.part(world)
    first, held = part[0]
    return slice(first, first + held)


def declaration_of_experts(weight: Declaration) -> Declaration:
    """All experts of a product, held by every rank."""
    experts = 1
    if weight.stacked:
        experts = weight.shape[0]
    uncut = Placement(weight.placement.grid)
    return Declaration((experts,), uncut, std=0.0)


def declaration_of_channels(weight: Declaration, role: Role) -> Declaration:
    """Experts and channels of a product's input, or of the gradient of its output: those dims of the weight."""
    every_dim = range(len(weight.shape))
    first_output = 1 if weight.stacked else 0
    experts = every_dim[:first_output]
    outputs = every_dim[first_output:-1]
    inputs = every_dim[-1:]
    channels = inputs if role == "input" else outputs
    dims = [*experts, *channels]
    sizes = [weight.shape[dim] for dim in dims]
    cut: DimCuts = ()
    for dim, axis in weight.placement.cut:
        if dim in dims:
            new_dim = dims.index(dim)
            cut = (*cut, (new_dim, axis))
    grid = weight.placement.grid
    placement = Placement(grid, cut)
    return Declaration(tuple(sizes), placement, std=0.0)
