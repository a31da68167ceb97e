"""A transformer block as steps. Their order and lanes stand in anatomy/step_specs.py; here is what each one does.

The carry: `x_TD` the residual stream; `given_TD` what attention, MLP or experts gave for it last, which the next norm
adds to it; `share` which tokens these are; `aux` the balance losses so far; between the steps of an MoE layer also
`h_TD` (normed input), `routing`, `receipt`, `rows`, `y_RD`, `y_TD` and `shared_TD`. All that experts' ranks say to each
other is said in `dispatch` and `combine`, so that these can run on a lane of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from moefold.anatomy.step_specs import block_step_specs, is_moe_layer
from moefold.comm import byte_counters
from moefold.config.run import ModelConfig
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.attention.mla import LatentAttention
from moefold.model.mlp import DenseMlp
from moefold.model.moe.layer import MoeLayer
from moefold.model.parts import ModelParts
from moefold.model.steps import Carry, bind_step_methods, run_step_sequence

T = TypeVar("T")
ATTENTION_KINDS = {"gqa": GroupedQueryAttention, "mla": LatentAttention}


def make_transformer_block(model: ModelConfig, layer: int, choices: ModelParts) -> Block:
    experts = LatentMoeBlock if model.moe.latent else MoeBlock
    return (experts if is_moe_layer(model, layer) else DenseBlock)(model, layer, choices)


class Block(nn.Module):
    """What both kinds share: attention, and running the steps in order."""

    def __init__(self, model: ModelConfig, layer: int, choices: ModelParts):
        super().__init__()
        self.attention = ATTENTION_KINDS[model.attention.kind](model, layer, choices)
        self.specs = block_step_specs(model, layer)

    def attend(self, carry: Carry) -> Carry:
        x_TD, given_TD = self.attention(carry["x_TD"], carry.get("given_TD"), carry["share"])
        return {**carry, "x_TD": x_TD, "given_TD": given_TD}

    def steps(self):
        return bind_step_methods(self.specs, self)

    def forward(self, carry: Carry) -> Carry:
        return run_step_sequence(self.steps(), carry)


class DenseBlock(Block):
    def __init__(self, model: ModelConfig, layer: int, choices: ModelParts):
        super().__init__(model, layer, choices)
        self.dense = DenseMlp(model, choices.kernels, choices.world)

    def mlp(self, carry: Carry) -> Carry:
        x_TD, given_TD = self.dense(carry["x_TD"], carry["given_TD"])
        return {**carry, "x_TD": x_TD, "given_TD": given_TD}


class MoeBlock(Block):
    def __init__(self, model: ModelConfig, layer: int, choices: ModelParts):
        super().__init__(model, layer, choices)
        self.moe = MoeLayer(model, layer, choices)

    def route(self, carry: Carry) -> Carry:
        x_TD, h_TD, for_router_TD = self.moe.norm(carry["x_TD"], carry["given_TD"])
        imposed = carry.get("imposed", {}).get(self.moe.router.layer)
        imposed_TK = carry["share"].slice_for_rank(imposed) if imposed is not None else None
        routing, aux = self.moe.router(for_router_TD, carry["share"], imposed_TK)
        carry = {**carry, "x_TD": x_TD, "h_TD": h_TD, "routing": routing, "aux": carry["aux"] + aux}
        return drop_from_carry(carry, "given_TD")

    def narrow(self, carry: Carry) -> Carry:
        return {**carry, "latent_TD": self.moe.narrow(carry["h_TD"])}

    def dispatch(self, carry: Carry) -> Carry:
        travelling = carry["latent_TD"] if "latent_TD" in carry else carry["h_TD"]
        receipt = self.moe.dispatcher.plan(carry["routing"])
        rows = self.travel(lambda: self.moe.dispatcher.dispatch(travelling, receipt))
        return drop_from_carry({**carry, "receipt": receipt, "rows": rows}, "latent_TD", "routing")

    def shared(self, carry: Carry) -> Carry:
        return {**carry, "shared_TD": self.moe.shared(carry["h_TD"])}

    def experts(self, carry: Carry) -> Carry:
        carry = {**carry, "y_RD": self.moe.experts(carry["rows"])}
        return drop_from_carry(carry, "rows", "h_TD")

    def combine(self, carry: Carry) -> Carry:
        y_TD = self.travel(lambda: self.moe.dispatcher.combine(carry["y_RD"], carry["receipt"]))
        return self.add_shared_experts(drop_from_carry(carry, "y_RD", "receipt"), y_TD)

    def add_shared_experts(self, carry: Carry, y_TD: torch.Tensor) -> Carry:
        """What routed and shared experts gave together."""
        if "shared_TD" in carry:
            y_TD = y_TD + carry["shared_TD"]
        return drop_from_carry({**carry, "given_TD": y_TD}, "shared_TD")

    def travel(self, send: Callable[[], T]) -> T:
        """Do it, and note the bytes that left this rank."""
        with byte_counters.counted_bytes_sent(this_thread=True) as sent:
            result = send()
        if self.training:
            self.moe.router.load.note_moved(sum(sent.values()))
        return result


class LatentMoeBlock(MoeBlock):
    """Results come back at the latent's width; widening them is a step of its own, behind the travel."""

    def combine(self, carry: Carry) -> Carry:
        y_TD = self.travel(lambda: self.moe.dispatcher.combine(carry["y_RD"], carry["receipt"]))
        return drop_from_carry({**carry, "y_TD": y_TD}, "y_RD", "receipt")

    def widen(self, carry: Carry) -> Carry:
        return self.add_shared_experts(drop_from_carry(carry, "y_TD"), self.moe.widen(carry["y_TD"]))


def settle_residual(carry: Carry) -> Carry:
    """The carry with what was given last on the stream: one tensor, to be handed on."""
    given_TD = carry.get("given_TD")
    return carry if given_TD is None else drop_from_carry({**carry, "x_TD": carry["x_TD"] + given_TD}, "given_TD")


def drop_from_carry(carry: Carry, *names: str) -> Carry:
    """The carry without what no later step reads, so that its memory can go."""
    return {name: value for name, value in carry.items() if name not in names}
