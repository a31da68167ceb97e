"""Activations of MLPs and experts, by name: the function, and whether it acts on a gate that multiplies a second part.

    gated      a = function(gate) * up    the first weight is `gate_up`, (2, F, D)
    ungated    a = function(up)           the first weight is `up`, (F, D)

Torch-free.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moefold.config.run import ModelConfig


class ActivationKind(NamedTuple):
    function: str
    gated: bool

    @property
    def parts(self) -> int:
        """How many parts of the inner width the first product has: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def up_name(self) -> str:
        """The name of the first weight."""
        return "gate_up" if self.gated else "up"

    @property
    def up_rows(self) -> Literal["gate_up", "outputs"]:
        """What the output dims of the first weight are, as a parameter's declaration has it."""
        return "gate_up" if self.gated else "outputs"

    def up_outputs(self, ffn: int) -> tuple[int, ...]:
        """The output dims of the first weight."""
        return (2, ffn) if self.gated else (ffn,)


ACTIVATIONS = {
    "swiglu": ActivationKind("silu", gated=True),
    "clamped_swiglu": ActivationKind("clamped_silu", gated=True),
    "geglu": ActivationKind("gelu", gated=True),
    "geglu_tanh": ActivationKind("gelu_tanh", gated=True),
    "reglu": ActivationKind("relu", gated=True),
    "silu": ActivationKind("silu", gated=False),
    "gelu": ActivationKind("gelu", gated=False),
    "gelu_tanh": ActivationKind("gelu_tanh", gated=False),
    "relu": ActivationKind("relu", gated=False),
    "relu2": ActivationKind("relu2", gated=False),
}
OWN_OPS = ("swiglu", "clamped_swiglu")  # activations with an op of their name


def activation_op(name: str) -> str:
    """The op that computes an activation."""
    return name if name in OWN_OPS else "mlp_activation"


def shared_activation(model: ModelConfig) -> str:
    """The activation of shared experts: that of routed experts, but never clamped."""
    name = model.moe.activation
    return "swiglu" if name == "clamped_swiglu" else name


def expert_kind(model: ModelConfig) -> ActivationKind:
    return ACTIVATIONS[model.moe.activation]


def shared_kind(model: ModelConfig) -> ActivationKind:
    return ACTIVATIONS[shared_activation(model)]


def dense_kind(model: ModelConfig) -> ActivationKind:
    return ACTIVATIONS[model.dense_activation]
