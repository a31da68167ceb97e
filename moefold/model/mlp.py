"""The dense gated MLP, of dense layers and of shared experts: down(silu(gate x) * up x)."""

from __future__ import annotations

import torch
from torch import nn

from moefold.config.run import ModelConfig
from moefold.kernels.bind import Kernels
from moefold.model.norm import RMSNorm
from moefold.model.steps import Region
from moefold.precision.linear import Linear


class GatedMlp(nn.Module):
    def __init__(self, model: ModelConfig, ffn: int, kernels: Kernels):
        super().__init__()
        self.gate_up = Linear(model.hidden, 2, ffn, std=model.init_std)
        self.down = Linear(ffn, model.hidden, std=model.init_std / (2 * model.layers) ** 0.5)
        self.swiglu = kernels.swiglu
        self.activation = Region()

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.swiglu, self.gate_up(x_TD)))


class DenseMlp(GatedMlp):
    """The MLP of a dense block, with its own norm."""

    def __init__(self, model: ModelConfig, kernels: Kernels):
        super().__init__(model, model.dense_ffn, kernels)
        self.norm = RMSNorm(model.hidden, model.norm_eps, kernels)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x_TD))
