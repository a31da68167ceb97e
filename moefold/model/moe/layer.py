"""What an MoE block has in place of its MLP: norm, router, shared experts, routed experts and their dispatcher."""

from __future__ import annotations

from torch import nn

from moefold.config.run import ModelConfig
from moefold.model.choices import Choices
from moefold.model.mlp import GatedMlp
from moefold.model.moe.experts import Experts
from moefold.model.moe.router import Router
from moefold.model.norm import RMSNorm


class MoeLayer(nn.Module):
    def __init__(self, model: ModelConfig, choices: Choices):
        super().__init__()
        kernels, world = choices.kernels, choices.world
        self.norm = RMSNorm(model.hidden, model.norm_eps, kernels, world)
        self.router = Router(model, kernels, world)
        self.experts = Experts(model, kernels, world)
        if model.moe.shared_ffn:
            self.shared = GatedMlp(model, model.moe.shared_ffn, kernels, world)
        self.dispatcher = choices.dispatcher
