"""The router: the K experts of each token, their weights, the count of choices, and the balance losses.

Scores are at least fp32 whatever the model's precision. Losses are sums over tokens, as every loss is, and independent
of how a batch is split over ranks; divided by the number of tokens, perfect balance gives one:

    balance   E x sum_e (share of the choices that went to e) x (score of e, normalised over experts)
    device    the same with each expert's share replaced by the mean of its group's
    z         (log sum_e exp logit_e)^2: keeps logits small

Choices are counted over a sequence, or each sample of a packed one, over a microbatch (of a data-parallel rank), or
over the global batch. The global batch needs a forward pass of its own, since its counts are known only after the
router has seen all of it; `previous_batch` uses the counts of the step before instead.

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
from moefold.dispatch.clone_weights import CloneFigures
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.router_ops import router_logits, router_topk
from moefold.kernels.routing.router_spec import RouterSpec
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.model.moe.capacity import drop_beyond_capacity, drops_choices
from moefold.model.moe.jitter import multiply_by_jitter
from moefold.model.moe.packed_samples import counts_of_samples, leave_out_padding
from moefold.model.moe.sequence_choice import expert_choice, round_robin_experts, sinkhorn_choice
from moefold.model.steps import inside_recompute
from moefold.model.token_layout import TokenShard

SumOverRanks = Callable[[Tensor], Tensor]
RecordChoices = Callable[[Tensor, TokenShard], object]


class Router(DeclaringModule):
    def __init__(self, model: ModelConfig, layer: int, kernels: BoundKernels, world: World):
        super().__init__(world)
        moe = model.moe
        self.moe = moe
        self.layer = layer
        self.spec = router_spec_of(moe)
        self.router_logits = kernels[router_logits]
        self.router_topk = kernels[router_topk]
        experts = moe.experts
        std = model.init_std
        width = model.hidden
        self.weight = self.declare_parameter("weight", experts, width, std=std)
        self.bias = None
        if moe.biases:
            self.bias = self.declare_parameter("bias", experts, std=0.0)
        self.lora: Callable[[Tensor], Tensor] | None = None  # an adapter beside the weight (precision/low_rank.py)
        self.load = ExpertLoad(experts, layer)
        self.drops_choices = drops_choices(moe)
        self.sums_over_sharing: dict[int, SumOverRanks] = {}  # by the cp ranks that share a sequence
        for size, axes in world.context_axes.items():
            self.sums_over_sharing[size] = bind_collective(all_reduce_no_grad, axes.cp_tp)

    def forward(
        self,
        h_TD: Tensor,
        share: TokenShard,
        imposed_TK: Tensor | None = None,
    ) -> tuple[Routing, Tensor | None]:
        """The routing, and this rank's summand of the balance losses, if there are any. `imposed_TK` replaces the top-k
        selection."""
        logits_TE = self.logits(h_TD, share)
        if imposed_TK is None:
            imposed_TK = self.sequence_wide_choice(logits_TE, share)
        load = self.load
        bias_E = load.bias_E.to(logits_TE.dtype)
        span = share.single_tokens if share.is_packed else share.span
        chosen = self.router_topk(logits_TE, bias_E, self.spec, imposed_TK, span)
        if share.is_packed:
            chosen = leave_out_padding(chosen, self.moe, share)
        weights_TK, ids_TK, counts_BE, shares_BE, squares_B = chosen
        routing = Routing(weights_TK, ids_TK)
        if self.drops_choices and share.past is None:  # a generated token has no others to share a capacity with
            sharing = self.world.cp_tp
            routing = drop_beyond_capacity(routing, self.moe, share, sharing)
        if self.training:
            load.count(counts_BE, ids_TK, routing.ids_TK)
        if load.record and not inside_recompute():
            load.record(ids_TK, share)
        if share.past is not None:  # generated text is not trained on
            return routing, None
        sums = (counts_BE, shares_BE, squares_B)
        sum_over_sharing = self.sums_over_sharing[share.cp.size]
        losses = balance_losses(*sums, self.moe, load, sum_over_sharing, share)
        return routing, losses

    def logits(self, h_TD: Tensor, share: TokenShard) -> Tensor:
        jitter = self.moe.router.jitter
        if jitter and self.training:
            # In fp32: small noise would be lost in the rounding to bf16.
            wide = torch.promote_types(h_TD.dtype, torch.float32)
            wide_TD = h_TD.to(wide)
            number_T = share.token_number_T
            layer = self.layer
            noisy_TD = multiply_by_jitter(wide_TD, jitter, number_T, layer)
            logits_TE = router_logits(noisy_TD, self.weight)
        else:
            logits_TE = self.router_logits(h_TD, self.weight)
        if self.lora is not None:
            logits_TE = logits_TE + self.lora(h_TD)
        if self.bias is None:
            return logits_TE
        return logits_TE + self.bias

    def sequence_wide_choice(self, logits_TE: Tensor, share: TokenShard) -> Tensor | None:
        """Choices made over whole sequences, or round robin; None where each token chooses for itself."""
        kind = self.moe.router.kind
        if self.moe.router.force_balance:
            number_T = share.token_number_T
            return round_robin_experts(number_T, self.moe)
        if kind == "token_choice":
            return None
        choose = expert_choice if kind == "expert_choice" else sinkhorn_choice
        logits_BSE = share.gather_all_tokens(logits_TE, self.world.cp_tp)
        ids_BSK = choose(logits_BSE, self.moe)
        return share.slice_for_rank(ids_BSK)


def router_spec_of(moe: MoeConfig) -> RouterSpec:
    router = moe.router
    extension = find_extension("router_score", router.score)
    score_function = None
    if extension is not None:
        score_function = extension.load()
    return RouterSpec(
        moe.top_k,
        router.score,
        router.normalize,
        router.scale,
        router.groups,
        router.groups_chosen,
        router.group_score,
        score_function=score_function,
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
        bias_E = torch.zeros(experts, dtype=torch.float32)
        self.register_buffer("bias_E", bias_E)
        even = 1 / experts
        share_E = torch.full((experts,), even, dtype=torch.float64)
        self.register_buffer("share_E", share_E)
        counts_E = torch.zeros(experts, dtype=torch.int64)
        self.register_buffer("counts_E", counts_E, persistent=False)
        dropped = torch.zeros((), dtype=torch.int64)
        self.register_buffer("dropped", dropped, persistent=False)
        self.moved = 0  # bytes of tokens that dispatch and combine sent in forward; a number of the host
        self.clones = CloneFigures()  # numbers of the host, too
        # called with the expert ids of each microbatch, and which of its tokens they belong to
        self.record: RecordChoices | None = None

    @torch.no_grad()
    def count(self, counts_BE: Tensor, ids_TK: Tensor, kept_TK: Tensor) -> None:
        """Add choices: their number by sequence and expert, the ids by token, and the ids that capacity kept."""
        if inside_recompute():
            return
        self.counts_E += counts_BE.sum(0)
        if kept_TK is not ids_TK:  # the same tensor without a capacity: nothing is dropped
            is_chosen = ids_TK >= 0
            is_kept = kept_TK >= 0
            kept = is_kept.sum()
            self.dropped += is_chosen.sum() - kept

    def note_moved(self, sent: int) -> None:
        if not inside_recompute():
            self.moved += sent

    def note_clones(self, figures: CloneFigures) -> None:
        if not inside_recompute():
            self.clones = self.clones.plus(figures)

    @torch.no_grad()
    def remember_batch_shares(self, counts_E: Tensor, sound: Tensor | bool = True) -> None:
        """Store each expert's share of a whole batch, unless its step was not finite (`sound`)."""
        total = counts_E.sum()
        at_least_one = total.clamp(min=1)
        shares_E = counts_E / at_least_one
        if isinstance(sound, Tensor):
            shares_E = shares_E.where(sound, self.share_E)
        self.share_E.copy_(shares_E)

    def forget_counts(self) -> None:
        self.counts_E.zero_()
        self.dropped.zero_()
        self.moved = 0
        self.clones = CloneFigures()


def expert_loads(model: nn.Module) -> list[ExpertLoad]:
    """The loads of a model's routers, in the order of its layers."""
    modules = model.modules()
    return [module for module in modules if isinstance(module, ExpertLoad)]


def balance_losses(
    counts_BE: Tensor,
    shares_BE: Tensor,
    squares_B: Tensor,
    moe: MoeConfig,
    load: ExpertLoad,
    sum_over_ranks: SumOverRanks,
    share: TokenShard,
) -> Tensor:
    """This rank's summand of all losses of a layer's router, each with its weight, from the sums over sequences of
    kernels/routing/router_ops.py. Scores are normalised over experts, so that smaller scores do not lower the loss."""
    balance = moe.balance
    total = shares_BE.new_zeros(())
    if balance.aux_loss or balance.device_loss:
        load_BE = expert_load_shares(counts_BE, moe, load, sum_over_ranks, share)
        weight = moe.experts * balance.aux_loss
        factor_BE = weight * load_BE
        if balance.device_loss:
            group_load_BE = mean_over_groups(load_BE, balance.devices)
            weight = moe.experts * balance.device_loss
            factor_BE = factor_BE + weight * group_load_BE
        factor_BE = factor_BE.to(shares_BE.dtype)
        weighted_BE = factor_BE * shares_BE
        total = total + weighted_BE.sum()
    if balance.z_loss:
        square_sum = squares_B.sum()
        total = total + balance.z_loss * square_sum
    return total


def mean_over_groups(load_BE: Tensor, groups: int) -> Tensor:
    """Each expert's load replaced by the mean of its group's."""
    shape = (groups, -1)
    by_group = load_BE.unflatten(-1, shape)
    means = by_group.mean(-1)
    size = by_group.shape[-1]
    return means.repeat_interleave(size, -1)


def expert_load_shares(
    counts_BE: Tensor,
    moe: MoeConfig,
    load: ExpertLoad,
    sum_over_ranks: SumOverRanks,
    share: TokenShard,
) -> Tensor:
    """Each expert's share of the choices that are counted together: (B, E) for sequences, else (1, E). Sequences and
    microbatches are counted over the ranks that hold parts of them. Where samples are packed, counts are of single
    tokens, and so is the result for sequences."""
    over = moe.balance.aux_over
    if over in ("global_batch", "previous_batch"):
        return load.share_E[None]
    if over == "microbatch":
        counts_BE = counts_BE.sum(0, keepdim=True)
    if over == "sequence" and share.is_packed:
        counts_BE = counts_of_samples(counts_BE, share, sum_over_ranks)
    else:
        counts_BE = sum_over_ranks(counts_BE)
    total_B1 = counts_BE.sum(-1, keepdim=True)
    at_least_one_B1 = total_B1.clamp(min=1)
    return counts_BE.double() / at_least_one_B1
