"""A transformer block as steps. The anatomy (anatomy/step_specs.py) has their order and lanes; here is what each one
does.

A step takes the carry of a microbatch and returns the next: `stream` the residual stream, `token_shard` which tokens of
the batch this rank holds, `aux` the balance losses so far; the steps of an MoE layer add their own (moe/layer.py). All
messages between ranks of experts are sent in `plan`, `dispatch` and `combine`, which run on a lane of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from moefold.anatomy.step_specs import block_step_specs, is_moe_layer
from moefold.config.extensions import find_extension
from moefold.config.run import ModelConfig
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.attention.mla import LatentAttention
from moefold.model.mlp import DenseMlp
from moefold.model.moe.layer import MoeSublayer
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import (
    Carry,
    StepMethods,
    StepRun,
    Steps,
    bind_steps,
    drop_from_carry,
    run_step_sequence,
    with_token_numbers,
)
from moefold.precision.linear import draws_by_token

MakeAttention = Callable[[ModelConfig, int, ModelParts], Any]
ATTENTION_KINDS = {"gqa": GroupedQueryAttention, "mla": LatentAttention}


def attention_kind(name: str) -> MakeAttention:
    """The class of an attention, built in or from another package: a module with a `norm`, called on normed tokens."""
    extension = find_extension("attention", name)
    if extension is not None:
        return extension.load()
    return ATTENTION_KINDS[name]


def make_transformer_block(model: ModelConfig, layer: int, parts: ModelParts) -> Block:
    is_moe = is_moe_layer(model, layer)
    kind = MoeBlock if is_moe else DenseBlock
    return kind(model, layer, parts)


class Block(nn.Module):
    """Attention, and what dense and MoE blocks share: running their steps in order."""

    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__()
        make_attention = attention_kind(model.attention.kind)
        self.attention = make_attention(model, layer, parts)
        self.specs = block_step_specs(model, layer, parts.row_chunks)
        self.layer = layer

    def attend(self, carry: Carry) -> Carry:
        stream = carry["stream"]
        shard = carry["token_shard"]
        attention = self.attention
        stream, h_TD = stream.normed(attention.norm)
        y_TD = attention(h_TD, shard)
        stream = stream.plus(y_TD)
        return carry | {"stream": stream}

    def step_methods(self) -> StepMethods:
        """The method of each step, by the name that the anatomy gives the step."""
        raise NotImplementedError

    def steps(self) -> Steps:
        methods = self.step_methods()
        steps = bind_steps(self.specs, methods, self.layer)
        if draws_by_token(self):
            return with_token_numbers(steps)
        return steps

    def forward(self, carry: Carry) -> Carry:
        steps = self.steps()
        return run_step_sequence(steps, carry)


class DenseBlock(Block):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        self.dense = DenseMlp(model, parts)

    def mlp(self, carry: Carry) -> Carry:
        stream = carry["stream"]
        stream, h_TD = stream.normed(self.dense.norm)
        y_TD = self.dense(h_TD)
        stream = stream.plus(y_TD)
        return carry | {"stream": stream}

    def step_methods(self) -> StepMethods:
        return {"attend": self.attend, "mlp": self.mlp}


class MoeBlock(Block):
    """The steps of an MoE layer are the layer's own methods; the block norms before the first and adds the output to
    the stream after the last."""

    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        norm = AddNorm(model, parts)
        self.moe = MoeSublayer(model, layer, parts, norm)

    def route(self, carry: Carry) -> Carry:
        stream = carry["stream"]
        stream, h_TD, for_router_TD = stream.normed_for_two(self.moe.norm)
        carry = carry.copy()
        carry["stream"] = stream
        carry["h_TD"] = h_TD
        carry["for_router_TD"] = for_router_TD
        return self.moe.route_tokens(carry)

    def run_last_step(self, run: StepRun, carry: Carry) -> Carry:
        """The layer's last step, with the layer's output on the stream."""
        carry = run(carry)
        stream = carry["stream"]
        output_TD = carry["output_TD"]
        carry = drop_from_carry(carry, "output_TD")
        carry["stream"] = stream.plus(output_TD)
        return carry

    def step_methods(self) -> StepMethods:
        methods = self.moe.step_methods()
        methods["attend"] = self.attend
        methods["route"] = self.route
        last = self.specs[-1].name
        run_last = methods[last]
        methods[last] = partial(self.run_last_step, run_last)
        return methods
