"""The whole model: embed, blocks, predict. Its losses are sums over tokens; whoever calls divides, once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from moefold.anatomy.steps import embed, is_moe, predict
from moefold.config.run import ModelConfig
from moefold.kernels.bind import Kernels
from moefold.layout.axes import Axis
from moefold.model.block import DenseBlock, MoeBlock
from moefold.model.embedding import Embedding
from moefold.model.head import Head
from moefold.model.moe.balance import Load, update_loads
from moefold.model.steps import Carry, Step, run_steps


class Losses(NamedTuple):
    """Sums over the tokens of a microbatch."""

    cross_entropy: torch.Tensor
    balance: torch.Tensor


class Transformer(nn.Module):
    def __init__(self, model: ModelConfig, seq_len: int, kernels: Kernels):
        super().__init__()
        self.model = model
        self.embedding = Embedding(model)
        self.blocks = nn.ModuleList(
            (MoeBlock if is_moe(model, layer) else DenseBlock)(model, layer, seq_len, kernels)
            for layer in range(model.layers)
        )
        self.head = Head(model, self.embedding, kernels)

    def embed(self, carry: Carry) -> Carry:
        x_TD = self.embedding(carry["tokens_BS"].flatten())
        aux = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        return {**carry, "x_TD": x_TD, "sequences": len(carry["tokens_BS"]), "aux": aux}

    def predict(self, carry: Carry) -> Carry:
        return {**carry, "loss": self.head.loss(carry["x_TD"], carry["labels_BS"].flatten())}

    def body(self) -> list[Step]:
        """From tokens to the last residual stream."""
        inner = [step for block in self.blocks for step in block.steps()]  # pyright: ignore[reportCallIssue]
        return [Step(embed(self.model), self.embed), *inner]

    def steps(self) -> list[Step]:
        return [*self.body(), Step(predict(self.model), self.predict)]

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> Losses:
        carry = run_steps(self.steps(), {"tokens_BS": tokens_BS, "labels_BS": labels_BS})
        return Losses(carry["loss"], carry["aux"])

    def logits(self, ids_BS: torch.Tensor) -> torch.Tensor:
        carry = run_steps(self.body(), {"tokens_BS": ids_BS})
        return self.head.logits(carry["x_TD"]).unflatten(0, ids_BS.shape)

    def balance(self, everyone: Axis) -> torch.Tensor:
        """After a step: move the selection biases. Returns how many tokens each layer's experts got, counts_LE."""
        loads = [module for module in self.modules() if isinstance(module, Load)]
        return update_loads(loads, self.model.moe.bias_rate, everyone)
