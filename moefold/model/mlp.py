"""The dense gated MLP, of dense layers and of shared experts: down(silu(gate x) * up x)."""

from __future__ import annotations

import torch
from torch import nn

from moefold.comm.collectives import all_gather, reduce_scatter
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.swiglu import swiglu
from moefold.layout.axes import World
from moefold.layout.placement import sharded_over_tp
from moefold.model.norm import AddNorm
from moefold.precision.linear import Linear


class GatedMlp(nn.Module):
    def __init__(self, model: ModelConfig, ffn: int, kernels: BoundKernels, world: World):
        super().__init__()
        down_std = model.init_std / (2 * model.layers) ** 0.5
        self.gate_up = Linear(world, model.hidden, 2, ffn, std=model.init_std, placement=sharded_over_tp(1))
        self.down = Linear(world, ffn, model.hidden, std=down_std, placement=sharded_over_tp(1))
        self.swiglu, self.tp = kernels[swiglu], world.axis("tp")

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_CD = all_gather(x_TD, self.tp)  # all tokens of this cp rank meet this rank's part of the width
        summand_CD = self.down(self.swiglu(self.gate_up(x_CD)))
        return reduce_scatter(summand_CD, self.tp)


class DenseMlp(GatedMlp):
    """The MLP of a dense block, with the norm that the block applies before it."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(model, model.dense_ffn, kernels, world)
        self.norm = AddNorm(model.hidden, model.norm_eps, kernels, world)
