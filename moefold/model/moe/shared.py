"""The shared experts, which process every token: one wide MLP, in some models times a sigmoid gate."""

from __future__ import annotations

from torch import Tensor

from moefold.anatomy.activations import shared_activation
from moefold.config.run import ModelConfig
from moefold.model.mlp import Mlp
from moefold.model.parts import ModelParts
from moefold.precision.linear import Linear


class SharedExperts(Mlp):
    def __init__(self, model: ModelConfig, parts: ModelParts):
        ffn = model.moe.shared_ffn
        activation = shared_activation(model)
        super().__init__(model, ffn, activation, parts)
        self.gate = None
        if model.moe.shared_gate:
            std = model.init_std
            self.gate = Linear(parts.world, model.hidden, 1, std=std)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = super().forward(x_TD)
        if self.gate is None:
            return y_TD
        score_T1 = self.gate(x_TD)
        gate_T1 = score_T1.sigmoid()
        return gate_T1 * y_TD
