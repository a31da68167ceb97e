"""The router: which experts each token visits, and with what weight.

T tokens, D width, E experts, K choices. Scores are fp32 whatever the model's precision.
"""

from __future__ import annotations

import torch

from moefold.config.run import ModelConfig
from moefold.dispatch.base import Routing
from moefold.kernels.bind import Kernels
from moefold.layout.axes import World
from moefold.layout.declare import Declaring
from moefold.model.moe.balance import Load, sequence_balance_loss
from moefold.model.moe.capacity import limited
from moefold.model.share import Share


class Router(Declaring):
    def __init__(self, model: ModelConfig, kernels: Kernels, world: World):
        super().__init__(world)
        self.moe = model.moe
        self.router_logits, self.router_topk = kernels.router_logits, kernels.router_topk
        self.weight = self.declare("weight", model.moe.experts, model.hidden, std=model.init_std)
        self.load = Load(model.moe.experts)

    def forward(self, h_TD: torch.Tensor, share: Share) -> tuple[Routing, torch.Tensor]:
        """The routing, and this rank's summand of the balance loss."""
        logits_TE = self.router_logits(h_TD, self.weight)
        bias_E = self.load.bias_E.to(logits_TE.dtype)
        probs_TK, ids_TK, scores_TE = self.router_topk(logits_TE, bias_E, self.moe.top_k, self.moe.normalize_top_k)
        if self.training:
            self.load.count(ids_TK)
        routing = limited(Routing(probs_TK, ids_TK), self.moe, share, self.world.axis("cp", "tp"))
        return routing, self.balance_loss(scores_TE, ids_TK, share)

    def balance_loss(self, scores_TE: torch.Tensor, ids_TK: torch.Tensor, share: Share) -> torch.Tensor:
        if self.moe.aux_loss == 0:
            return scores_TE.new_zeros(())
        return self.moe.aux_loss * sequence_balance_loss(scores_TE, ids_TK, share, self.world.axis("cp", "tp"))
