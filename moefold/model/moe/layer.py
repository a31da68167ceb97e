"""What an MoE block has in place of its MLP: norm, router, shared experts, routed experts and their dispatcher."""

from __future__ import annotations

from torch import nn

from moefold.config.run import ModelConfig
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.bind import Kernels
from moefold.model.mlp import GatedMlp
from moefold.model.moe.experts import Experts
from moefold.model.moe.router import Router
from moefold.model.norm import RMSNorm


class MoeLayer(nn.Module):
    def __init__(self, model: ModelConfig, kernels: Kernels):
        super().__init__()
        self.norm = RMSNorm(model.hidden, model.norm_eps, kernels)
        self.router = Router(model, kernels)
        self.experts = Experts(model, kernels)
        if model.moe.shared_ffn:
            self.shared = GatedMlp(model, model.moe.shared_ffn, kernels)
        self.dispatcher = LocalDispatcher(model.moe.experts, kernels)
