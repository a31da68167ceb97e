"""The router: the K experts of each token, their weights, and the balance losses.

T tokens, D width, E experts, K choices. Scores are at least fp32 whatever the model's precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.extensions import find_extension
from moefold.config.run import ModelConfig, MoeConfig
from moefold.dispatch.base import Routing
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.router_ops import router_logits, router_topk
from moefold.kernels.routing.router_spec import RouterSpec
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.model.moe.balance import ExpertLoad, balance_losses
from moefold.model.moe.capacity import drop_beyond_capacity, drops_choices
from moefold.model.moe.forced_routing import round_robin_experts
from moefold.model.moe.jitter import multiply_by_jitter
from moefold.model.moe.sequence_choice import expert_choice, sinkhorn_choice
from moefold.model.steps import inside_recompute
from moefold.model.token_layout import TokenShard


class Router(DeclaringModule):
    def __init__(self, model: ModelConfig, layer: int, kernels: BoundKernels, world: World):
        super().__init__(world)
        moe = self.moe = model.moe
        self.layer = layer
        self.spec = router_spec_of(moe)
        self.router_logits = kernels[router_logits]
        self.router_topk = kernels[router_topk]
        self.weight = self.declare_parameter("weight", moe.experts, model.hidden, std=model.init_std)
        self.bias = self.declare_parameter("bias", moe.experts, std=0.0) if moe.biases else None
        self.load = ExpertLoad(moe.experts, layer)
        self.drops_choices = drops_choices(moe)
        self.sharing = world.cp_tp

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
        losses = balance_losses(counts_BE, shares_BE, squares_B, self.moe, self.load, self.sharing)
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
