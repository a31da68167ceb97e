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
from moefold.model.steps import Carry, Step, bind_steps, drop_from_carry, run_step_sequence

ATTENTION_KINDS = {"gqa": GroupedQueryAttention, "mla": LatentAttention}


def attention_kind(name: str) -> Callable[[ModelConfig, int, ModelParts], Any]:
    """The class of an attention, built in or from another package: a module with a `norm`, called on normed tokens."""
    extension = find_extension("attention", name)
    return ATTENTION_KINDS[name] if extension is None else extension.load()


def make_transformer_block(model: ModelConfig, layer: int, parts: ModelParts) -> Block:
    kind = MoeBlock if is_moe_layer(model, layer) else DenseBlock
    return kind(model, layer, parts)


class Block(nn.Module):
    """Attention, and what dense and MoE blocks share: running their steps in order."""

    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__()
        self.attention = attention_kind(model.attention.kind)(model, layer, parts)
        self.specs = block_step_specs(model, layer)
        self.layer = layer

    def attend(self, carry: Carry) -> Carry:
        stream, h_TD = carry["stream"].normed(self.attention.norm)
        y_TD = self.attention(h_TD, carry["token_shard"])
        return carry | {"stream": stream.plus(y_TD)}

    def steps(self) -> list[Step]:
        raise NotImplementedError

    def forward(self, carry: Carry) -> Carry:
        return run_step_sequence(self.steps(), carry)


class DenseBlock(Block):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        self.dense = DenseMlp(model, parts.kernels, parts.world)

    def mlp(self, carry: Carry) -> Carry:
        stream, h_TD = carry["stream"].normed(self.dense.norm)
        y_TD = self.dense(h_TD)
        return carry | {"stream": stream.plus(y_TD)}

    def steps(self) -> list[Step]:
        methods = {"attend": self.attend, "mlp": self.mlp}
        return bind_steps(self.specs, methods, self.layer)


class MoeBlock(Block):
    """The steps of an MoE layer are the layer's own methods; the block norms before the first and adds the output to
    the stream after the last."""

    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        norm = AddNorm(model.hidden, model.norm_eps, parts.kernels, parts.world)
        self.moe = MoeSublayer(model, layer, parts, norm)

    def route(self, carry: Carry) -> Carry:
        stream, h_TD, for_router_TD = carry["stream"].normed_for_two(self.moe.norm)
        normed = {"stream": stream, "h_TD": h_TD, "for_router_TD": for_router_TD}
        return self.moe.route_tokens(carry | normed)

    def run_last_step(self, run: Callable[[Carry], Carry], carry: Carry) -> Carry:
        """The layer's last step, with the layer's output on the stream."""
        carry = run(carry)
        stream = carry["stream"].plus(carry["output_TD"])
        return drop_from_carry(carry | {"stream": stream}, "output_TD")

    def steps(self) -> list[Step]:
        methods = self.moe.step_methods()
        methods["attend"] = self.attend
        methods["route"] = self.route
        last = self.specs[-1].name
        methods[last] = partial(self.run_last_step, methods[last])
        return bind_steps(self.specs, methods, self.layer)
