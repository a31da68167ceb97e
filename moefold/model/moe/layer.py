"""What an MoE block has in place of its MLP: norm, router, shared experts, routed experts and their dispatcher."""

from __future__ import annotations

from torch import nn

from moefold.config.run import ModelConfig
from moefold.model.moe.experts import Experts
from moefold.model.moe.router import Router
from moefold.model.moe.shared import SharedExperts
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.precision.linear import Linear


class MoeLayer(nn.Module):
    def __init__(self, model: ModelConfig, layer: int, choices: ModelParts):
        super().__init__()
        moe, kernels, world = model.moe, choices.kernels, choices.world
        self.norm = AddNorm(model.hidden, model.norm_eps, kernels, world)
        self.router = Router(model, layer, kernels, world)
        self.experts = Experts(model, kernels, world)
        if moe.shared_ffn:
            self.shared = SharedExperts(model, kernels, world)
        if moe.latent:  # tokens travel and experts work at this width
            self.narrow = Linear(world, model.hidden, moe.latent, std=model.init_std)
            self.widen = Linear(world, moe.latent, model.hidden, std=model.init_std)
        self.dispatcher = choices.dispatcher
