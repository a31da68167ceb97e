"""The shared experts, which process every token: one wide MLP, in some models times a sigmoid gate."""

from __future__ import annotations

from torch import Tensor

from moefold.anatomy.activations import shared_activation
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import World
from moefold.model.mlp import Mlp
from moefold.precision.linear import Linear


class SharedExperts(Mlp):
    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(model, model.moe.shared_ffn, shared_activation(model), kernels, world)
        self.gate = None
        if model.moe.shared_gate:
            self.gate = Linear(world, model.hidden, 1, std=model.init_std)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = super().forward(x_TD)
        if self.gate is None:
            return y_TD
        gate_T1 = self.gate(x_TD).sigmoid()
        return gate_T1 * y_TD
