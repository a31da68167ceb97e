"""The whole model: embed, blocks, predict. Its losses are sums over tokens; whoever calls divides, once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from moefold.anatomy.steps import embed, is_moe, predict
from moefold.comm.collectives import gather
from moefold.config.run import ModelConfig
from moefold.model.block import DenseBlock, MoeBlock
from moefold.model.choices import Choices
from moefold.model.embedding import Embedding
from moefold.model.head import Head
from moefold.model.moe.balance import Load, update_loads
from moefold.model.share import share_of
from moefold.model.steps import Carry, Step, run_steps


class Losses(NamedTuple):
    """Sums over tokens of a microbatch: `cross_entropy` over those of this cp rank (the same on each of its tp ranks),
    `balance` over those of this rank alone."""

    cross_entropy: torch.Tensor
    balance: torch.Tensor


class Transformer(nn.Module):
    def __init__(self, model: ModelConfig, choices: Choices):
        super().__init__()
        self.model = model
        self.world = choices.world
        self.embedding = Embedding(model, choices.world)
        self.blocks = nn.ModuleList(
            (MoeBlock if is_moe(model, layer) else DenseBlock)(model, layer, choices) for layer in range(model.layers)
        )
        self.head = Head(model, self.embedding, choices.kernels, choices.world)

    def embed(self, carry: Carry) -> Carry:
        share = share_of(carry["tokens_BS"], self.world)
        x_TD = self.embedding(share.of_context(carry["tokens_BS"]))
        aux = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        return {**carry, "x_TD": x_TD, "share": share, "aux": aux}

    def predict(self, carry: Carry) -> Carry:
        return {**carry, "loss": self.head(carry["x_TD"], carry["share"].of_context(carry["labels_BS"]))}

    def body(self) -> list[Step]:
        """From tokens to the last residual stream."""
        inner = [step for block in self.blocks for step in block.steps()]  # pyright: ignore[reportCallIssue]
        return [Step(embed(self.model), self.embed), *inner]

    def steps(self) -> list[Step]:
        return [*self.body(), Step(predict(self.model), self.predict)]

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> Losses:
        carry = run_steps(self.steps(), {"tokens_BS": tokens_BS, "labels_BS": labels_BS})
        return Losses(carry["loss"], carry["aux"])

    def labelled(self, labels_BS: torch.Tensor) -> torch.Tensor:
        """How many of the tokens behind `cross_entropy` have a label."""
        return (share_of(labels_BS, self.world).of_context(labels_BS) >= 0).sum()

    def logits(self, ids_BS: torch.Tensor) -> torch.Tensor:
        carry = run_steps(self.body(), {"tokens_BS": ids_BS})
        share = carry["share"]
        logits_BSV = self.head(carry["x_TD"]).unflatten(0, (share.sequences, -1))
        return gather(logits_BSV.transpose(0, 1), share.cp)[share.ordered].transpose(0, 1)

    def balance(self) -> torch.Tensor:
        """After a step: move the selection biases. Returns how many tokens each layer's experts got, counts_LE."""
        loads = [module for module in self.modules() if isinstance(module, Load)]
        return update_loads(loads, self.model.moe.bias_rate, self.world.axis("dp", "cp", "tp"))
