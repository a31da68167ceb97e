"""The router: the K experts of each token, their weights, the count of choices, and the balance losses.

Scores are at least fp32 whatever the model's precision. Losses are sums over tokens, as every loss is, and independent
of how a batch is split over ranks; divided by the number of tokens, perfect balance gives one:

    balance   E x sum_e (share of the choices that went to e) x (score of e, normalised over experts)
    device    the same with each expert's share replaced by the mean of its group's
    z         (log sum_e exp logit_e)^2: keeps logits small

Choices are counted over a sequence, a microbatch (of a data-parallel rank), or the global batch. The global batch needs
a forward pass of its own, since its counts are known only after the router has seen all of it; `previous_batch` uses
the counts of the step before instead.

T tokens of B sequences, D width, E experts, K choices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_no_grad, bind_collective
from moefold.config.extensions import find_extension
from moefold.config.run import ModelConfig, MoeConfig
from moefold.dispatch.base import Routing
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.router_ops import router_logits, router_topk
from moefold.kernels.routing.router_spec import RouterSpec
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.rerun import inside_recompute
from moefold.model.moe.capacity import drop_beyond_capacity, drops_choices
from moefold.model.moe.jitter import multiply_by_jitter
from moefold.model.moe.sequence_choice import expert_choice, round_robin_experts, sinkhorn_choice
from moefold.model.token_layout import TokenShard

SumOverRanks = Callable[[Tensor], Tensor]


class Router(DeclaringModule):
    def __init__(self, model: ModelConfig, layer: int, kernels: BoundKernels, world: World):
        super().__init__(world)
        moe = self.moe = model.moe
        self.layer = layer
        self.spec = router_spec_of(moe)
        self.router_logits = kernels[router_logits]
        self.router_topk = kernels[router_topk]
        shape = (moe.experts, model.hidden)
        self.weight = self.declare_parameter("weight", *shape, std=model.init_std)
        self.bias = None
        if moe.biases:
            self.bias = self.declare_parameter("bias", moe.experts, std=0.0)
        self.load = ExpertLoad(moe.experts, layer)
        self.drops_choices = drops_choices(moe)
        self.sharing = world.cp_tp  # the ranks that hold parts of the same sequences
        self.sum_over_sharing = bind_collective(all_reduce_no_grad, self.sharing)

    def forward(self, h_TD: Tensor, share: TokenShard, imposed_TK: Tensor | None = None) -> tuple[Routing, Tensor]:
        """The routing, and this rank's summand of the balance losses. `imposed_TK` replaces the top-k selection."""
        logits_TE = self.logits(h_TD, share)
        if imposed_TK is None:
            imposed_TK = self.sequence_wide_choice(logits_TE, share)
        bias_E = self.load.bias_E.to(logits_TE.dtype)
        chosen = self.router_topk(logits_TE, bias_E, self.spec, imposed_TK, share.span)
        weights_TK, ids_TK, counts_BE, shares_BE, squares_B = chosen
        routing = Routing(weights_TK, ids_TK)
        if self.drops_choices:
            routing = drop_beyond_capacity(routing, self.moe, share, self.sharing)
        if self.training:
            self.load.count(counts_BE, ids_TK, routing.ids_TK)
        if self.load.record and not inside_recompute():
            self.load.record(ids_TK, share)
        losses = balance_losses(counts_BE, shares_BE, squares_B, self.moe, self.load, self.sum_over_sharing)
        return routing, losses

    def logits(self, h_TD: Tensor, share: TokenShard) -> Tensor:
        jitter = self.moe.router.jitter
        if jitter and self.training:
            # In fp32: small noise would be lost in the rounding to bf16.
            wide_TD = h_TD.to(torch.promote_types(h_TD.dtype, torch.float32))
            noisy_TD = multiply_by_jitter(wide_TD, jitter, share.token_number_T, self.layer)
            logits_TE = router_logits(noisy_TD, self.weight)
        else:
            logits_TE = self.router_logits(h_TD, self.weight)
        return logits_TE if self.bias is None else logits_TE + self.bias

    def sequence_wide_choice(self, logits_TE: Tensor, share: TokenShard) -> Tensor | None:
        """Choices made over whole sequences, or round robin; None where each token chooses for itself."""
        kind = self.moe.router.kind
        if self.moe.router.force_balance:
            return round_robin_experts(share.token_number_T, self.moe)
        if kind == "token_choice":
            return None
        choose = expert_choice if kind == "expert_choice" else sinkhorn_choice
        logits_BSE = share.gather_all_tokens(logits_TE, self.sharing)
        ids_BSK = choose(logits_BSE, self.moe)
        return share.slice_for_rank(ids_BSK)


def router_spec_of(moe: MoeConfig) -> RouterSpec:
    router = moe.router
    extension = find_extension("router_score", router.score)
    return RouterSpec(
        moe.top_k,
        router.score,
        router.normalize,
        router.scale,
        router.groups,
        router.groups_chosen,
        router.group_score,
        score_function=None if extension is None else extension.load(),
    )


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
        even_share_E = torch.full((experts,), 1 / experts, dtype=torch.float64)
        self.register_buffer("share_E", even_share_E)
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
    def remember_batch_shares(self, counts_E: Tensor) -> None:
        """Store each expert's share of a whole batch."""
        total = counts_E.sum().clamp(min=1)
        self.share_E.copy_(counts_E / total)

    def forget_counts(self) -> None:
        self.counts_E.zero_()
        self.dropped.zero_()
        self.moved = 0


def balance_losses(
    counts_BE: Tensor,
    shares_BE: Tensor,
    squares_B: Tensor,
    moe: MoeConfig,
    load: ExpertLoad,
    sum_over_ranks: SumOverRanks,
) -> Tensor:
    """This rank's summand of all losses of a layer's router, each with its weight, from the sums over sequences of
    kernels/routing/router_ops.py. Scores are normalised over experts, so that smaller scores do not lower the loss."""
    balance = moe.balance
    total = shares_BE.new_zeros(())
    if balance.aux_loss or balance.device_loss:
        load_BE = expert_load_shares(counts_BE, moe, load, sum_over_ranks)
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
    by_group = load_BE.unflatten(-1, (groups, -1))
    means = by_group.mean(-1)
    return means.repeat_interleave(experts // groups, -1)


def expert_load_shares(counts_BE: Tensor, moe: MoeConfig, load: ExpertLoad, sum_over_ranks: SumOverRanks) -> Tensor:
    """Each expert's share of the choices that are counted together: (B, E) for sequences, else (1, E). Sequences and
    microbatches are counted over the ranks that hold parts of them."""
    if moe.balance.aux_over in ("global_batch", "previous_batch"):
        return load.share_E[None]
    if moe.balance.aux_over == "microbatch":
        counts_BE = counts_BE.sum(0, keepdim=True)
    counts_BE = sum_over_ranks(counts_BE)
    total_B1 = counts_BE.sum(-1, keepdim=True)
    return counts_BE.double() / total_B1.clamp(min=1)
