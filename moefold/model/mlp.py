"""The dense MLP of dense layers and of shared experts: down(a), with a = silu(gate x) * up x or another activation.

T tokens of this rank, C tokens of its cp rank, D width, F this rank's part of the inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from moefold.anatomy.activations import ACTIVATIONS
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.mlp_activation import mlp_activation
from moefold.kernels.experts.swiglu import swiglu
from moefold.layout.placement import sharded_over_tp
from moefold.model.initialise import output_std
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Region, call_directly
from moefold.precision.linear import Linear

Activate = Callable[[Tensor, Tensor | None], Tensor]  # of the first product and the router's weights, if any


def bind_activation(name: str, kernels: BoundKernels) -> Activate:
    if name == "swiglu":
        return kernels[swiglu]
    activate = kernels[mlp_activation]
    kind = ACTIVATIONS[name]
    return partial(activate, kind=kind)


class Mlp(nn.Module):
    def __init__(self, model: ModelConfig, ffn: int, activation: str, parts: ModelParts):
        super().__init__()
        d = model.hidden
        world = parts.world
        # up, and with a gate the gate beside it
        kind = ACTIVATIONS[activation]
        outputs = kind.up_outputs(ffn)
        inner_dim = len(outputs) - 1
        over_ffn = sharded_over_tp(inner_dim)
        up_std = model.init_std
        rows = kind.up_rows
        up = Linear(world, d, *outputs, std=up_std, placement=over_ffn, rows=rows)
        self.up_name = kind.up_name
        self.add_module(self.up_name, up)
        # down
        over_inputs = sharded_over_tp(1)
        down_std = output_std(model)
        self.down = Linear(world, ffn, d, std=down_std, placement=over_inputs)
        kernels = parts.kernels
        self.activate = bind_activation(activation, kernels)
        self.gather_region = Region("norm")
        self.tp_projections = parts.tp_projections

    def forward(self, x_TD: Tensor) -> Tensor:
        # All tokens of this cp rank meet this rank's part of the width.
        over_tp = self.tp_projections
        up = self.get_submodule(self.up_name)
        h_C2F = over_tp.gather(x_TD, up, self.gather_region)  # or h_CF, without a gate
        a_CF = self.activate(h_C2F, None)
        return over_tp.scatter(a_CF, self.down, call_directly)


class DenseMlp(Mlp):
    """The MLP of a dense block, with the norm that the block applies before it."""

    def __init__(self, model: ModelConfig, parts: ModelParts):
        ffn = model.dense_ffn
        activation = model.dense_activation
        super().__init__(model, ffn, activation, parts)
        self.norm = AddNorm(model, parts)
