"""Keeping experts evenly loaded, by a bias and by losses, all independent of how a batch is split over ranks.

The bias: after each step an expert that got less than its share becomes a little easier to choose, and the reverse.
The losses are sums over tokens, as every loss is; divided by the number of tokens, perfect balance gives one:

    balance   E x sum_e (share of the choices that went to e) x (score of e as a share of one)
    device    the same with each expert's share replaced by the mean of its group's
    z         (log sum_e exp logit_e)^2: keeps logits small

Choices are counted over a sequence, a microbatch (of a data-parallel rank), or the global batch: the only one that
needs a pass of its own, since its counts are known when all of it has been through the router. `previous_batch` takes
those of the step before instead.

T tokens of B sequences, E experts, K choices, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.host_copies import integers_on_device
from moefold.config.run import MoeConfig
from moefold.layout.axes import Axis
from moefold.model.steps import inside_recompute


class ExpertLoad(nn.Module):
    """Choices each expert got since the last update, the selection bias made from them, and their shares in the last
    batch that was surveyed."""

    bias_E: torch.Tensor
    share_E: torch.Tensor
    counts_E: torch.Tensor
    dropped: torch.Tensor

    def __init__(self, experts: int, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.register_buffer("bias_E", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("share_E", torch.full((experts,), 1 / experts, dtype=torch.float64))
        self.register_buffer("counts_E", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.moved = 0  # bytes that dispatch and combine sent, known to the host
        self.record: Callable[[torch.Tensor], object] | None = None

    @torch.no_grad()
    def count(self, counts_BE: torch.Tensor, ids_TK: torch.Tensor, kept_TK: torch.Tensor) -> None:
        """Choices made, by sequence and expert and by token, and those of them that were kept."""
        if inside_recompute():
            return
        self.counts_E += counts_BE.sum(0)
        if kept_TK is not ids_TK:  # without a capacity none is dropped, and nothing need be counted
            self.dropped += (ids_TK >= 0).sum() - (kept_TK >= 0).sum()

    def note_moved(self, sent: int) -> None:
        if not inside_recompute():
            self.moved += sent

    @torch.no_grad()
    def update(
        self, counts_E: torch.Tensor, moe: MoeConfig, sound: torch.Tensor | bool = True, pace: float = 1.0
    ) -> None:
        """Move the bias against the load if the step was sound, and start counting anew. `pace` is the learning rate as
        a share of its highest: tokens of one kind change experts together, so when weights hardly move any more, a bias
        that goes on as before carries them to and fro."""
        if moe.balance.bias_rate:
            lack_E = counts_E.sum() - counts_E * len(counts_E)  # E times (mean - count): whole numbers, so exact
            step_E = lack_E.sign() if moe.balance.bias_step == "sign" else lack_E / counts_E.sum().clamp(min=1)
            rate = moe.balance.bias_rate * (pace if moe.balance.bias_pace == "learning_rate" else 1.0)
            self.bias_E += rate * step_E * sound
        self.forget_counts()

    @torch.no_grad()
    def remember_batch_shares(self, counts_E: torch.Tensor) -> None:
        """Remember the shares of a whole batch."""
        self.share_E.copy_(counts_E / counts_E.sum().clamp(min=1))

    def forget_counts(self) -> None:
        self.counts_E.zero_()
        self.dropped.zero_()
        self.moved = 0


class LayerLoads(NamedTuple):
    """What a step's routing came to, over all ranks: choices of each expert, dropped ones, and bytes that were sent.
    `layers` are their numbers in the model."""

    layers: list[int]
    counts_LE: torch.Tensor
    dropped_L: torch.Tensor
    moved_L: torch.Tensor


def sum_loads_over_ranks(loads: list[ExpertLoad], everyone: Axis) -> LayerLoads:
    """Sum every layer's counts over all ranks, in one message."""
    if not loads:
        nothing = torch.zeros(0, dtype=torch.int64)
        return LayerLoads([], nothing.view(0, 0), nothing, nothing)
    moved_L = integers_on_device([load.moved for load in loads], loads[0].dropped.device)
    all_L = [torch.stack([load.counts_E for load in loads]), torch.stack([load.dropped for load in loads])[:, None]]
    joint = all_reduce_no_grad(torch.cat((*all_L, moved_L[:, None]), dim=1), everyone)
    return LayerLoads([load.layer for load in loads], joint[:, :-2], joint[:, -2], joint[:, -1])


def join_pipeline_loads(parts: Sequence[LayerLoads]) -> LayerLoads:
    """Those of all pipeline ranks, by layer."""
    rows = [
        row for part in parts for row in zip(part.layers, part.counts_LE, part.dropped_L, part.moved_L, strict=True)
    ]
    if not rows:
        return parts[0]
    layers, counts, dropped, moved = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    return LayerLoads(list(layers), torch.stack(counts), torch.stack(dropped), torch.stack(moved))


def update_selection_biases(
    loads: list[ExpertLoad], moe: MoeConfig, everyone: Axis, sound: torch.Tensor | bool = True, pace: float = 1.0
) -> LayerLoads:
    """After a step: gather the counts and update each layer's bias."""
    found = sum_loads_over_ranks(loads, everyone)
    for load, counts_E in zip(loads, found.counts_LE, strict=True):
        if moe.balance.aux_over == "previous_batch":
            load.remember_batch_shares(counts_E)
        load.update(counts_E, moe, sound, pace)
    return found


def remember_global_shares(loads: list[ExpertLoad], everyone: Axis) -> None:
    """After a pass that only counted: remember the shares of the whole batch, and forget the counts."""
    for load, counts_E in zip(loads, sum_loads_over_ranks(loads, everyone).counts_LE, strict=True):
        load.remember_batch_shares(counts_E)
        load.forget_counts()


def balance_losses(
    counts_BE: torch.Tensor,
    shares_BE: torch.Tensor,
    squares_B: torch.Tensor,
    moe: MoeConfig,
    load: ExpertLoad,
    sharing: Axis,
) -> torch.Tensor:
    """This rank's summand of all losses that a layer's router has, each with its weight, from the sums over sequences
    that kernels/routing/router_topk.py gives. Scores are shares of one, so that no router lowers its loss by shrinking
    all."""
    total = shares_BE.new_zeros(())
    if moe.balance.aux_loss or moe.balance.device_loss:
        load_BE = expert_load_shares(counts_BE, moe, load, sharing)
        price_BE = (moe.experts * moe.balance.aux_loss) * load_BE
        if moe.balance.device_loss:
            of_groups = load_BE.unflatten(-1, (moe.balance.devices, -1)).mean(-1)
            each_BE = of_groups.repeat_interleave(moe.experts // moe.balance.devices, -1)
            price_BE = price_BE + (moe.experts * moe.balance.device_loss) * each_BE
        total = total + (price_BE.to(shares_BE.dtype) * shares_BE).sum()
    if moe.balance.z_loss:
        total = total + moe.balance.z_loss * squares_B.sum()
    return total


def expert_load_shares(counts_BE: torch.Tensor, moe: MoeConfig, load: ExpertLoad, sharing: Axis) -> torch.Tensor:
    """Each expert's share of the choices that are counted together: (B, E) for sequences, else (1, E). Sequences and
    microbatches are counted over the ranks that hold their parts."""
    if moe.balance.aux_over in ("global_batch", "previous_batch"):
        return load.share_E[None]
    if moe.balance.aux_over == "microbatch":
        counts_BE = counts_BE.sum(0, keepdim=True)
    return share_of_choices(all_reduce_no_grad(counts_BE, sharing))


def share_of_choices(counts_BE: torch.Tensor) -> torch.Tensor:
    return counts_BE.double() / counts_BE.sum(-1, keepdim=True).clamp(min=1)
