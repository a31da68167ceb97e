"""Load balance of experts, by a selection bias and by losses; both are independent of how a batch is split over ranks.

The bias: after each step, the bias of an expert with less than its share of the choices rises, and the reverse.
The losses are sums over tokens, as every loss is; divided by the number of tokens, perfect balance gives one:

    balance   E x sum_e (share of the choices that went to e) x (score of e, normalised over experts)
    device    the same with each expert's share replaced by the mean of its group's
    z         (log sum_e exp logit_e)^2: keeps logits small

Choices are counted over a sequence, a microbatch (of a data-parallel rank), or the global batch. The global batch needs
a forward pass of its own, since its counts are known only after the router has seen all of it; `previous_batch` uses
the counts of the step before instead.

T tokens of B sequences, E experts, K choices, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.host_copies import integers_on_device
from moefold.config.run import MoeConfig
from moefold.layout.axes import Axis
from moefold.model.steps import inside_recompute
from moefold.model.token_layout import TokenShard


class ExpertLoad(nn.Module):
    """Choices of each expert since the last update, the selection bias, and each expert's share of the choices in the
    last batch that was counted."""

    bias_E: Tensor
    share_E: Tensor
    counts_E: Tensor
    dropped: Tensor

    def __init__(self, experts: int, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.register_buffer("bias_E", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("share_E", torch.full((experts,), 1 / experts, dtype=torch.float64))
        self.register_buffer("counts_E", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.moved = 0  # bytes of tokens that dispatch and combine sent in forward; a number of the host
        # called with the expert ids of each microbatch, and which of its tokens they belong to
        self.record: Callable[[Tensor, TokenShard], object] | None = None

    @torch.no_grad()
    def count(self, counts_BE: Tensor, ids_TK: Tensor, kept_TK: Tensor) -> None:
        """Add choices: their number by sequence and expert, the ids by token, and the ids that capacity kept."""
        if inside_recompute():
            return
        self.counts_E += counts_BE.sum(0)
        if kept_TK is not ids_TK:  # the same tensor without a capacity: nothing is dropped
            chosen = (ids_TK >= 0).sum()
            kept = (kept_TK >= 0).sum()
            self.dropped += chosen - kept

    def note_moved(self, sent: int) -> None:
        if not inside_recompute():
            self.moved += sent

    @torch.no_grad()
    def update(self, counts_E: Tensor, moe: MoeConfig, sound: Tensor | bool = True, pace: float = 1.0) -> None:
        """Move the bias against the load if the step was finite (`sound`), and reset the counts. `pace` is the learning
        rate as a share of its peak: similar tokens change experts together, so with small weight updates a bias that
        moves at full pace would make them oscillate."""
        balance = moe.balance
        if balance.bias_rate:
            total = counts_E.sum()
            deficit_E = total - counts_E * len(counts_E)  # E times (mean - count): whole numbers, so exact
            step_E = deficit_E.sign() if balance.bias_step == "sign" else deficit_E / total.clamp(min=1)
            factor = pace if balance.bias_pace == "learning_rate" else 1.0
            rate = balance.bias_rate * factor
            self.bias_E += rate * step_E * sound
        self.forget_counts()

    @torch.no_grad()
    def remember_batch_shares(self, counts_E: Tensor) -> None:
        """Store each expert's share of a whole batch."""
        total = counts_E.sum().clamp(min=1)
        self.share_E.copy_(counts_E / total)

    def forget_counts(self) -> None:
        self.counts_E.zero_()
        self.dropped.zero_()
        self.moved = 0


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
    joint = torch.cat((counts_LE, dropped_L[:, None], moved_L[:, None]), dim=1)
    joint = all_reduce_no_grad(joint, everyone)
    return LayerLoads(layers, joint[:, :-2], joint[:, -2], joint[:, -1])


def join_pipeline_loads(parts: Sequence[LayerLoads]) -> LayerLoads:
    """The loads of all pipeline ranks, sorted by layer."""
    rows = []
    for part in parts:
        rows += zip(part.layers, part.counts_LE, part.dropped_L, part.moved_L, strict=True)
    if not rows:
        return parts[0]
    rows.sort(key=itemgetter(0))
    layers, counts, dropped, moved = zip(*rows, strict=True)
    return LayerLoads(list(layers), torch.stack(counts), torch.stack(dropped), torch.stack(moved))


def update_selection_biases(
    loads: list[ExpertLoad], moe: MoeConfig, everyone: Axis, sound: Tensor | bool = True, pace: float = 1.0
) -> LayerLoads:
    """After a step: sum the counts over ranks and update each layer's bias."""
    summed = sum_loads_over_ranks(loads, everyone)
    for load, counts_E in zip(loads, summed.counts_LE, strict=True):
        if moe.balance.aux_over == "previous_batch":
            load.remember_batch_shares(counts_E)
        load.update(counts_E, moe, sound, pace)
    return summed


def remember_global_shares(loads: list[ExpertLoad], everyone: Axis) -> None:
    """After a forward pass that only counted: store the shares of the whole batch, and reset the counts."""
    summed = sum_loads_over_ranks(loads, everyone)
    for load, counts_E in zip(loads, summed.counts_LE, strict=True):
        load.remember_batch_shares(counts_E)
        load.forget_counts()


def balance_losses(
    counts_BE: Tensor,
    shares_BE: Tensor,
    squares_B: Tensor,
    moe: MoeConfig,
    load: ExpertLoad,
    sharing: Axis,
) -> Tensor:
    """This rank's summand of all losses of a layer's router, each with its weight, from the sums over sequences of
    kernels/routing/router_ops.py. Scores are normalised over experts, so that smaller scores do not lower the loss."""
    balance = moe.balance
    total = shares_BE.new_zeros(())
    if balance.aux_loss or balance.device_loss:
        load_BE = expert_load_shares(counts_BE, moe, load, sharing)
        factor_BE = (moe.experts * balance.aux_loss) * load_BE
        if balance.device_loss:
            group_load_BE = mean_over_groups(load_BE, balance.devices)
            factor_BE = factor_BE + (moe.experts * balance.device_loss) * group_load_BE
        weighted_BE = factor_BE.to(shares_BE.dtype) * shares_BE
        total = total + weighted_BE.sum()
    if balance.z_loss:
        total = total + balance.z_loss * squares_B.sum()
    return total


def mean_over_groups(load_BE: Tensor, groups: int) -> Tensor:
    """Each expert's load replaced by the mean of its group's."""
    experts = load_BE.shape[-1]
    means = load_BE.unflatten(-1, (groups, -1)).mean(-1)
    return means.repeat_interleave(experts // groups, -1)


def expert_load_shares(counts_BE: Tensor, moe: MoeConfig, load: ExpertLoad, sharing: Axis) -> Tensor:
    """Each expert's share of the choices that are counted together: (B, E) for sequences, else (1, E). Sequences and
    microbatches are counted over the ranks that hold parts of them (`sharing`)."""
    if moe.balance.aux_over in ("global_batch", "previous_batch"):
        return load.share_E[None]
    if moe.balance.aux_over == "microbatch":
        counts_BE = counts_BE.sum(0, keepdim=True)
    counts_BE = all_reduce_no_grad(counts_BE, sharing)
    return share_of_choices(counts_BE)


def share_of_choices(counts_BE: Tensor) -> Tensor:
    total_B1 = counts_BE.sum(-1, keepdim=True)
    return counts_BE.double() / total_B1.clamp(min=1)
