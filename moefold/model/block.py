"""A transformer block as steps. Their order and lanes stand in anatomy/steps.py; here is what each one does.

The carry: `x_TD` the residual stream; `share` which tokens these are; `aux` the balance loss so
far; between the steps of an MoE layer also `h_TD` (normed input), `receipt`, `rows`, `y_RD` and `shared_TD`.
"""

from __future__ import annotations

from torch import nn

from moefold.anatomy.steps import block_steps
from moefold.config.run import ModelConfig
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.choices import Choices
from moefold.model.mlp import DenseMlp
from moefold.model.moe.layer import MoeLayer
from moefold.model.steps import Carry, bind_steps, run_steps


class Block(nn.Module):
    """What both kinds share: attention, and running the steps in order."""

    def __init__(self, model: ModelConfig, layer: int, choices: Choices):
        super().__init__()
        self.attention = GroupedQueryAttention(model, choices)
        self.specs = block_steps(model, layer)

    def attend(self, carry: Carry) -> Carry:
        x_TD = carry["x_TD"]
        return {**carry, "x_TD": x_TD + self.attention(x_TD, carry["share"])}

    def steps(self):
        return bind_steps(self.specs, self)

    def forward(self, carry: Carry) -> Carry:
        return run_steps(self.steps(), carry)


class DenseBlock(Block):
    def __init__(self, model: ModelConfig, layer: int, choices: Choices):
        super().__init__(model, layer, choices)
        self.dense = DenseMlp(model, choices.kernels, choices.world)

    def mlp(self, carry: Carry) -> Carry:
        x_TD = carry["x_TD"]
        return {**carry, "x_TD": x_TD + self.dense(x_TD)}


class MoeBlock(Block):
    def __init__(self, model: ModelConfig, layer: int, choices: Choices):
        super().__init__(model, layer, choices)
        self.moe = MoeLayer(model, choices)

    def route(self, carry: Carry) -> Carry:
        h_TD = self.moe.norm(carry["x_TD"])
        routing, aux = self.moe.router(h_TD, carry["share"])
        receipt = self.moe.dispatcher.plan(routing)
        return {**carry, "h_TD": h_TD, "receipt": receipt, "aux": carry["aux"] + aux}

    def dispatch(self, carry: Carry) -> Carry:
        return {**carry, "rows": self.moe.dispatcher.dispatch(carry["h_TD"], carry["receipt"])}

    def shared(self, carry: Carry) -> Carry:
        return {**carry, "shared_TD": self.moe.shared(carry["h_TD"])}

    def experts(self, carry: Carry) -> Carry:
        carry = {**carry, "y_RD": self.moe.experts(carry["rows"])}
        return without(carry, "rows", "h_TD")

    def combine(self, carry: Carry) -> Carry:
        y_TD = self.moe.dispatcher.combine(carry["y_RD"], carry["receipt"])
        if "shared_TD" in carry:
            y_TD = y_TD + carry["shared_TD"]
        carry = {**carry, "x_TD": carry["x_TD"] + y_TD}
        return without(carry, "y_RD", "receipt", "shared_TD")


def without(carry: Carry, *names: str) -> Carry:
    """The carry without what no later step reads, so that its memory can go."""
    return {name: value for name, value in carry.items() if name not in names}
