"""The shared experts: every token visits them. One wide gated MLP, with a gate of its own where a model has one."""

from __future__ import annotations

import torch

from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import World
from moefold.model.mlp import GatedMlp
from moefold.precision.linear import Linear


class SharedExperts(GatedMlp):
    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(model, model.moe.shared_ffn, kernels, world)
        self.gate = Linear(world, model.hidden, 1, std=model.init_std) if model.moe.shared_gate else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        y_TD = super().forward(x_TD)
        return y_TD if self.gate is None else self.gate(x_TD).sigmoid() * y_TD
