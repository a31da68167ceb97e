"""Load balance of experts after a step: choices summed over ranks, and the selection biases moved against the load.

The bias of an expert with less than its share of the choices rises, and the reverse. Nothing here depends on how a
batch is split over ranks. The balance losses of a forward pass are in router.py.

E experts, L MoE layers, F figures of clones, H figures of the host.
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
    """Routing statistics of a step, over all ranks: choices of each expert, dropped choices, bytes of tokens sent in
    forward, and the F figures of clones (`CloneFigures`). `layers` are the numbers of the MoE layers in the model."""

    layers: list[int]
    counts_LE: Tensor
    dropped_L: Tensor
    moved_L: Tensor
    clones_LF: Tensor


def sum_loads_over_ranks(loads: list[ExpertLoad], everyone: Axis) -> LayerLoads:
    """Sum every layer's counts over all ranks, in one all-reduce."""
    if not loads:
        nothing_L = torch.zeros(0, dtype=torch.int64)
        nothing_LE = nothing_L.view(0, 0)
        return LayerLoads([], nothing_LE, nothing_L, nothing_L, nothing_LE)
    layers = [load.layer for load in loads]
    counts = [load.counts_E for load in loads]
    dropped = [load.dropped for load in loads]
    counts_LE = torch.stack(counts)
    dropped_L = torch.stack(dropped)
    of_host_LH = host_figures_on_device(loads, dropped_L)
    # one message of all counts
    joint = torch.cat((counts_LE, dropped_L[:, None], of_host_LH), dim=1)
    joint = all_reduce_no_grad(joint, everyone)
    experts = counts_LE.shape[1]
    counts_LE = joint[:, :experts]
    dropped_L = joint[:, experts]
    moved_L = joint[:, experts + 1]
    clones_LF = joint[:, experts + 2 :]
    return LayerLoads(layers, counts_LE, dropped_L, moved_L, clones_LF)


def host_figures_on_device(loads: list[ExpertLoad], like: Tensor) -> Tensor:
    """The bytes that each layer sent, and the figures of its clones, on the device. Where nothing is ever sent, nothing
    is copied from the host."""
    figures: list[int] = []
    for load in loads:
        figures += (load.moved, *load.clones)
    layers = len(loads)
    if not any(figures):
        return like.new_zeros(layers, len(figures) // layers)
    flat = integers_on_device(figures, like.device)
    return flat.view(layers, -1)


def join_pipeline_loads(parts: Sequence[LayerLoads]) -> LayerLoads:
    """The loads of all pipeline ranks, sorted by layer."""
    rows = []
    for part in parts:
        rows += zip(*part, strict=True)
    if not rows:
        return parts[0]
    rows.sort(key=itemgetter(0))
    layers, *tensors = zip(*rows, strict=True)
    stacked = map(torch.stack, tensors)
    return LayerLoads(list(layers), *stacked)


def update_selection_biases(
    loads: list[ExpertLoad], moe: MoeConfig, everyone: Axis, sound: Tensor | bool = True, pace: float | Tensor = 1.0
) -> LayerLoads:
    """After a step: sum the counts over ranks and update each layer's bias."""
    balance = moe.balance
    remembers = balance.aux_over == "previous_batch"
    summed = sum_loads_over_ranks(loads, everyone)
    counts = summed.counts_LE
    for load, counts_E in zip(loads, counts, strict=True):
        if remembers:
            load.remember_batch_shares(counts_E, sound)
        move_selection_bias(load, counts_E, balance, sound, pace)
        load.forget_counts()
    return summed


@torch.no_grad()
def move_selection_bias(
    load: ExpertLoad, counts_E: Tensor, balance: BalanceConfig, sound: Tensor | bool, pace: float | Tensor
) -> None:
    """Move a layer's bias against the load if the step was finite (`sound`). `pace` is the learning rate as a share of
    its peak: similar tokens change experts together, so with small weight updates a bias that moves at full pace would
    make them oscillate."""
    if not balance.bias_rate:
        return
    total = counts_E.sum()
    deficit_E = total - counts_E * len(counts_E)  # E times (mean - count): whole numbers, so exact
    if balance.bias_step == "sign":
        step_E = deficit_E.sign()
    else:
        at_least_one = total.clamp(min=1)
        step_E = deficit_E / at_least_one
    follows_rate = balance.bias_pace == "learning_rate"
    factor = pace if follows_rate else 1.0
    rate = balance.bias_rate * factor
    if isinstance(rate, Tensor):
        rate = rate.float()  # as torch rounds a number of the host
    load.bias_E += rate * step_E * sound


def remember_global_shares(loads: list[ExpertLoad], everyone: Axis) -> None:
    """After a forward pass that only counted: store the shares of the whole batch, and reset the counts."""
    summed = sum_loads_over_ranks(loads, everyone)
    counts = summed.counts_LE
    for load, counts_E in zip(loads, counts, strict=True):
        load.remember_batch_shares(counts_E)
        load.forget_counts()
