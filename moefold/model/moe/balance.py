"""Load balance of experts after a step: choices summed over ranks, and the selection biases moved against the load.

The bias of an expert with less than its share of the choices rises, and the reverse. Nothing here depends on how a
batch is split over ranks. The balance losses of a forward pass are in router.py.

E experts, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.host_copies import integers_on_device
from moefold.config.run import BalanceConfig, MoeConfig
from moefold.layout.axes import Axis
from moefold.model.moe.router import ExpertLoad


class LayerLoads(NamedTuple):
    """Routing statistics of a step, over all ranks: choices of each expert, dropped choices, and bytes of tokens sent
    in forward. `layers` are the numbers of the MoE layers in the model."""

    layers: list[int]
    counts_LE: Tensor
    dropped_L: Tensor
    moved_L: Tensor


def sum_loads_over_ranks(loads: list[ExpertLoad], everyone: Axis) -> LayerLoads:
    """Sum every layer's counts over all ranks, in one all-reduce."""
    if not loads:
        nothing = torch.zeros(0, dtype=torch.int64)
        return LayerLoads([], nothing.view(0, 0), nothing, nothing)
    layers = [load.layer for load in loads]
    counts_LE = torch.stack([load.counts_E for load in loads])
    dropped_L = torch.stack([load.dropped for load in loads])
    moved_L = integers_on_device([load.moved for load in loads], dropped_L.device)
    dropped_L1 = dropped_L[:, None]
    moved_L1 = moved_L[:, None]
    joint = torch.cat((counts_LE, dropped_L1, moved_L1), dim=1)
    joint = all_reduce_no_grad(joint, everyone)
    widths = [counts_LE.shape[1], 1, 1]
    counts_LE, dropped_L1, moved_L1 = joint.split(widths, dim=1)
    return LayerLoads(layers, counts_LE, dropped_L1[:, 0], moved_L1[:, 0])


def join_pipeline_loads(parts: Sequence[LayerLoads]) -> LayerLoads:
    """The loads of all pipeline ranks, sorted by layer."""
    rows = []
    for part in parts:
        rows += zip(part.layers, part.counts_LE, part.dropped_L, part.moved_L, strict=True)
    if not rows:
        return parts[0]
    rows.sort(key=itemgetter(0))
    layers, counts, dropped, moved = zip(*rows, strict=True)
    stacked = map(torch.stack, (counts, dropped, moved))
    return LayerLoads(list(layers), *stacked)


def update_selection_biases(
    loads: list[ExpertLoad], moe: MoeConfig, everyone: Axis, sound: Tensor | bool = True, pace: float = 1.0
) -> LayerLoads:
    """After a step: sum the counts over ranks and update each layer's bias."""
    summed = sum_loads_over_ranks(loads, everyone)
    for load, counts_E in zip(loads, summed.counts_LE, strict=True):
        if moe.balance.aux_over == "previous_batch":
            load.remember_batch_shares(counts_E)
        move_selection_bias(load, counts_E, moe.balance, sound, pace)
        load.forget_counts()
    return summed


@torch.no_grad()
def move_selection_bias(
    load: ExpertLoad, counts_E: Tensor, balance: BalanceConfig, sound: Tensor | bool, pace: float
) -> None:
    """Move a layer's bias against the load if the step was finite (`sound`). `pace` is the learning rate as a share of
    its peak: similar tokens change experts together, so with small weight updates a bias that moves at full pace would
    make them oscillate."""
    if not balance.bias_rate:
        return
    total = counts_E.sum()
    deficit_E = total - counts_E * len(counts_E)  # E times (mean - count): whole numbers, so exact
    step_E = deficit_E.sign()
    if balance.bias_step != "sign":
        step_E = deficit_E / total.clamp(min=1)
    factor = pace if balance.bias_pace == "learning_rate" else 1.0
    rate = balance.bias_rate * factor
    load.bias_E += rate * step_E * sound


def remember_global_shares(loads: list[ExpertLoad], everyone: Axis) -> None:
    """After a forward pass that only counted: store the shares of the whole batch, and reset the counts."""
    summed = sum_loads_over_ranks(loads, everyone)
    for load, counts_E in zip(loads, summed.counts_LE, strict=True):
        load.remember_batch_shares(counts_E)
        load.forget_counts()
