"""The whole model: embed, blocks, predict. Its losses are sums over tokens; whoever calls divides, once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from moefold.anatomy.steps import embed, look_ahead, predict, set_aside
from moefold.comm.collectives import gather
from moefold.config.run import ModelConfig
from moefold.kernels.cross_entropy import IGNORED
from moefold.model.block import Block, make_block
from moefold.model.choices import Choices
from moefold.model.embedding import Embedding
from moefold.model.head import Head
from moefold.model.moe.balance import Load, Loads, survey_loads, update_loads
from moefold.model.mtp import LayerAhead, labels_ahead
from moefold.model.share import share_of
from moefold.model.steps import Carry, Step, run_steps


class Losses(NamedTuple):
    """Sums over tokens of a microbatch: `cross_entropy` over those of this cp rank (the same on each of its tp ranks),
    `balance` over those of this rank alone, `ahead_M` the cross-entropy of each layer of multi-token prediction."""

    cross_entropy: torch.Tensor
    balance: torch.Tensor
    ahead_M: torch.Tensor


class Transformer(nn.Module):
    def __init__(self, model: ModelConfig, choices: Choices):
        super().__init__()
        self.model = model
        self.world = choices.world
        self.embedding = Embedding(model, choices.world)
        self.blocks: list[Block] = nn.ModuleList(make_block(model, n, choices) for n in range(model.layers))  # pyright: ignore[reportAttributeAccessIssue]
        self.head = Head(model, self.embedding, choices.kernels, choices.world)
        depths = range(1, model.mtp + 1)
        self.ahead: list[LayerAhead] = nn.ModuleList(LayerAhead(model, depth, choices) for depth in depths)  # pyright: ignore[reportAttributeAccessIssue]

    def embed(self, carry: Carry) -> Carry:
        share = share_of(carry["tokens_BS"], self.world, carry.get("first", 0))
        x_TD = self.embedding(share.of_context(carry["tokens_BS"]))
        aux = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        return {**carry, "x_TD": x_TD, "share": share, "aux": aux, "streams": []}

    def look_ahead(self, layer: LayerAhead, carry: Carry) -> Carry:
        token_BS = labels_ahead(carry["labels_BS"], layer.depth - 1)
        token_C = carry["share"].of_context(token_BS.masked_fill(token_BS == IGNORED, 0))
        streams = carry["streams"] or [carry["x_TD"]]  # the model's own, for its loss
        return {**carry, "streams": streams, "x_TD": layer(carry["x_TD"], self.embedding(token_C))}

    def set_aside(self, layer: LayerAhead, carry: Carry) -> Carry:
        return {**carry, "streams": [*carry["streams"], layer.norm(carry["x_TD"])]}

    def predict(self, carry: Carry) -> Carry:
        """One loss for each stream: the model's own, and those set aside, which are normed."""
        streams = carry["streams"] or [carry["x_TD"]]
        labels = [carry["share"].of_context(labels_ahead(carry["labels_BS"], m)) for m in range(len(streams))]
        each = enumerate(zip(streams, labels, strict=True))
        return {**carry, "losses_1M": torch.stack([self.head(x_TD, labels_C, m > 0) for m, (x_TD, labels_C) in each])}

    def body(self) -> list[Step]:
        """From tokens to the last residual stream."""
        return [Step(embed(self.model), self.embed), *(step for block in self.blocks for step in block.steps())]

    def steps_ahead(self, layer: LayerAhead) -> list[Step]:
        begin = Step(look_ahead(self.model), partial(self.look_ahead, layer))
        return [begin, *layer.block.steps(), Step(set_aside(self.model), partial(self.set_aside, layer))]

    def steps(self) -> list[Step]:
        """From tokens to the losses. Further tokens are predicted in training only."""
        further = [step for layer in self.ahead for step in self.steps_ahead(layer)] if self.training else []
        return [*self.body(), *further, Step(predict(self.model), self.predict)]

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        first: int = 0,
        imposed: Mapping[int, torch.Tensor] | None = None,
    ) -> Losses:
        """`first` is the number of the first sequence in the run's order. `imposed` are the experts (B, S, K) that the
        routers of some layers, by their number, shall choose."""
        carry = {"tokens_BS": tokens_BS, "labels_BS": labels_BS, "first": first, "imposed": imposed or {}}
        carry = run_steps(self.steps(), carry)
        return Losses(carry["losses_1M"][0], carry["aux"], carry["losses_1M"][1:])

    def labelled(self, labels_BS: torch.Tensor) -> torch.Tensor:
        """How many of the tokens behind `cross_entropy` have a label, and behind each loss of `ahead_M`: (1 + M,)."""
        share = share_of(labels_BS, self.world)
        depths = range(1 + len(self.ahead))
        return torch.stack([(share.of_context(labels_ahead(labels_BS, m)) != IGNORED).sum() for m in depths])

    def logits(self, ids_BS: torch.Tensor) -> torch.Tensor:
        carry = run_steps(self.body(), {"tokens_BS": ids_BS})
        share = carry["share"]
        logits_BSV = self.head(carry["x_TD"]).unflatten(0, (share.sequences, -1))
        return gather(logits_BSV.transpose(0, 1), share.cp)[share.ordered].transpose(0, 1)

    def loads(self) -> list[Load]:
        return [module for module in self.modules() if isinstance(module, Load)]

    def survey(self) -> None:
        """After a pass over the whole batch that only counted: what the balance loss over it needs to know."""
        survey_loads(self.loads(), self.world.axis("dp", "cp", "tp"))

    def balance(self) -> Loads:
        """After a step: move the selection biases. Returns what the routing came to."""
        return update_loads(self.loads(), self.model.moe, self.world.axis("dp", "cp", "tp"))
