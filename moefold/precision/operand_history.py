"""Histories of operands: the largest magnitudes of an input or a gradient in the last steps, and scales from these.

    experts     for each expert the largest magnitude of its rows; a dense layer is one expert
    channels    for each expert and channel, where copies along columns have scales of their own

Ranks agree on them at the end of a step (precision/scale_histories.py). An expert or a channel that had no value other
than zero in all these steps has the scale of what it is a part of: a channel that of its expert, an expert that of the
expert with the largest values.

H steps, E experts, e of them held here, C channels held here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moefold.config.run import PrecisionConfig
from moefold.kernels.linear.product import Role
from moefold.kernels.quantise.delayed_tiles import DelayedScales
from moefold.kernels.quantise.fp8 import ScaleRule, scale_from_amax
from moefold.layout.axes import Axis, World
from moefold.layout.declare import Declaration, PartOfTensor
from moefold.layout.placement import DimCuts, Placement
from moefold.layout.weight_copies import cached_copy
from moefold.precision.linear import PlacedWeight, RecipeTensors


class MaximaWindow:
    """Largest magnitudes of the last steps, `last` (H, ...), and of the step under way so far, `now`: this rank's part
    of the tensor that `declaration` describes, on which the ranks of `axis` agree."""

    def __init__(self, steps: int, declaration: Declaration, world: World, axis: Axis):
        self.declaration = declaration
        self.part = declaration.part(world)
        self.axis = axis
        device = world.device
        sizes = [size for _, size in self.part]
        self.last = torch.zeros(steps, *sizes, device=device)
        self.now = torch.zeros(sizes, device=device)

    def state(self) -> PartOfTensor:
        steps = len(self.last)
        shape = (steps, *self.declaration.shape)
        all_steps = (0, steps)
        box = [all_steps, *self.part]
        return PartOfTensor(self.last, shape, box)


class OperandHistory:
    """The history of one operand of a product. `saturated`: values so far that were beyond the range of their scale,
    over all ranks; `saturated_now`: those of the step under way on this rank."""

    def __init__(self, weight: PlacedWeight, role: Role, options: PrecisionConfig, by_channel: bool):
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
        self.room = 2.0**options.margin
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

    def seen_now(self) -> tuple[Tensor, Tensor | None]:
        """Where the step under way takes note: (e,) of experts, (e, C) of channels where these are kept."""
        now_e = self.experts.now[self.held]
        if self.channels is None:
            return now_e, None
        experts = len(now_e)
        now_eC = self.channels.now.view(experts, -1)
        return now_e, now_eC

    def scales(self, rule: ScaleRule) -> DelayedScales:
        """Those of the last steps alone."""
        make_scales = partial(self.expert_scales, rule)
        return cached_copy(self.experts.last, rule, make_scales)

    def expert_scales(self, rule: ScaleRule, last_HE: Tensor) -> DelayedScales:
        """Made once a step, and kept until the history of experts, `last_HE`, changes."""
        seen_E = last_HE.amax(0)
        most = seen_E.amax()
        is_unseen_E = seen_E == 0
        most_E = torch.where(is_unseen_E, most, seen_E)
        most_e1 = most_E[self.held, None]
        largest_e1 = most_e1 * self.room
        rows_e1 = scale_from_amax(largest_e1, rule)
        if self.channels is None:
            return DelayedScales(rows_e1, rows_e1)
        experts = len(most_e1)
        last = self.channels.last
        seen_channels = last.amax(0)
        seen_eC = seen_channels.view(experts, -1)
        is_unseen_eC = seen_eC == 0
        most_eC = torch.where(is_unseen_eC, most_e1, seen_eC)
        largest_eC = most_eC * self.room
        columns_eC = scale_from_amax(largest_eC, rule)
        return DelayedScales(rows_e1, columns_eC)


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
