"""The dense gated MLP of dense layers and of shared experts: down(silu(gate x) * up x).

T tokens of this rank, C tokens of its cp rank, D width, F this rank's part of the inner width.
"""

from __future__ import annotations

from torch import Tensor, nn

from moefold.comm.collectives import all_gather, reduce_scatter
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.swiglu import swiglu
from moefold.layout.axes import World
from moefold.layout.placement import sharded_over_tp
from moefold.model.norm import AddNorm
from moefold.model.steps import Region
from moefold.precision.linear import Linear


class GatedMlp(nn.Module):
    def __init__(self, model: ModelConfig, ffn: int, kernels: BoundKernels, world: World):
        super().__init__()
        d, std = model.hidden, model.init_std
        down_std = std / (2 * model.layers) ** 0.5
        over_ffn = sharded_over_tp(1)
        self.gate_up = Linear(world, d, 2, ffn, std=std, placement=over_ffn)
        self.down = Linear(world, ffn, d, std=down_std, placement=over_ffn)
        self.swiglu = kernels[swiglu]
        self.tp = world.axis("tp")
        self.activation = Region()

    def forward(self, x_TD: Tensor) -> Tensor:
        x_CD = all_gather(x_TD, self.tp)  # all tokens of this cp rank meet this rank's part of the width
        h_C2F = self.gate_up(x_CD)
        a_CF = self.activation(self.swiglu, h_C2F)
        summand_CD = self.down(a_CF)
        return reduce_scatter(summand_CD, self.tp)


class DenseMlp(GatedMlp):
    """The MLP of a dense block, with its own norm. Takes the residual stream and the attention output that is still to
    be added to it; returns their sum and the MLP's output."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(model, model.dense_ffn, kernels, world)
        self.norm = AddNorm(model.hidden, model.norm_eps, kernels, world)

    def forward(self, x_TD: Tensor, given_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, h_TD, _ = self.norm(x_TD, given_TD)
        return x_TD, super().forward(h_TD)
