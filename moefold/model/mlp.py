"""The dense MLP of dense layers and of shared experts: down(a), with a = silu(gate x) * up x or another activation.

T tokens of this rank, C tokens of its cp rank, D width, F this rank's part of the inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from moefold.anatomy.activations import ACTIVATIONS
from moefold.comm.collectives import all_gather, bind_collective, reduce_scatter
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.mlp_activation import mlp_activation
from moefold.kernels.experts.swiglu import swiglu
from moefold.layout.axes import World
from moefold.layout.placement import sharded_over_tp
from moefold.model.norm import AddNorm
from moefold.model.steps import Region
from moefold.precision.linear import Linear

Activate = Callable[[Tensor, Tensor | None], Tensor]  # of the first product and the router's weights, if any


def bind_activation(name: str, kernels: BoundKernels) -> Activate:
    if name == "swiglu":
        return kernels[swiglu]
    return partial(kernels[mlp_activation], kind=ACTIVATIONS[name])


class Mlp(nn.Module):
    def __init__(self, model: ModelConfig, ffn: int, activation: str, kernels: BoundKernels, world: World):
        super().__init__()
        d = model.hidden
        std = model.init_std
        residual_adds = 2 * model.layers
        down_std = std / residual_adds**0.5
        kind = ACTIVATIONS[activation]
        outputs = kind.up_outputs(ffn)
        over_ffn = sharded_over_tp(len(outputs) - 1)
        up = Linear(world, d, *outputs, std=std, placement=over_ffn)
        self.up_name = kind.up_name
        self.add_module(self.up_name, up)
        over_inputs = sharded_over_tp(1)
        self.down = Linear(world, ffn, d, std=down_std, placement=over_inputs)
        self.activate = bind_activation(activation, kernels)
        tp = world.axis("tp")
        self.gather_tokens = bind_collective(all_gather, tp)
        self.gather_region = Region("norm")
        self.scatter_sums = bind_collective(reduce_scatter, tp)

    def forward(self, x_TD: Tensor) -> Tensor:
        # All tokens of this cp rank meet this rank's part of the width.
        x_CD = self.gather_region(self.gather_tokens, x_TD)
        project_up = self.get_submodule(self.up_name)
        h_C2F = project_up(x_CD)  # or h_CF, without a gate
        a_CF = self.activate(h_C2F, None)
        summand_CD = self.down(a_CF)
        return self.scatter_sums(summand_CD)


class DenseMlp(Mlp):
    """The MLP of a dense block, with the norm that the block applies before it."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        activation = model.dense_activation
        super().__init__(model, model.dense_ffn, activation, kernels, world)
        eps = model.norm_eps
        self.norm = AddNorm(model.hidden, eps, kernels, world)
