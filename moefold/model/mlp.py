"""The dense gated MLP of dense layers and of shared experts: down(silu(gate x) * up x).

T tokens of this rank, C tokens of its cp rank, D width, F this rank's part of the inner width.
"""

from __future__ import annotations

from torch import Tensor, nn

from moefold.comm.collectives import all_gather, bind_collective, reduce_scatter
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
        d = model.hidden
        std = model.init_std
        down_std = std / (2 * model.layers) ** 0.5
        over_ffn = sharded_over_tp(1)
        self.gate_up = Linear(world, d, 2, ffn, std=std, placement=over_ffn)
        self.down = Linear(world, ffn, d, std=down_std, placement=over_ffn)
        self.swiglu = kernels[swiglu]
        tp = world.axis("tp")
        self.gather_tokens = bind_collective(all_gather, tp)
        self.scatter_sums = bind_collective(reduce_scatter, tp)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_CD = self.gather_tokens(x_TD)  # all tokens of this cp rank meet this rank's part of the width
        h_C2F = self.gate_up(x_CD)
        a_CF = self.swiglu(h_C2F)
        summand_CD = self.down(a_CF)
        return self.scatter_sums(summand_CD)


class DenseMlp(GatedMlp):
    """The MLP of a dense block, with the norm that the block applies before it."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(model, model.dense_ffn, kernels, world)
        self.norm = AddNorm(model.hidden, model.norm_eps, kernels, world)
