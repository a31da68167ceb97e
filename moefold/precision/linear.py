"""The linear layer every dense projection is made of: where a precision recipe will act."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.layout.declare import Declaring
from moefold.layout.placement import REPLICATED, Placement


class Linear(Declaring):
    """y = x W^T + b. With `outputs` of several sizes, such as (2, F), the result has them as its last dims."""

    def __init__(self, inputs: int, *outputs: int, bias: bool = False, std: float, placement: Placement = REPLICATED):
        super().__init__()
        self.weight = self.declare("weight", *outputs, inputs, std=std, placement=placement)
        self.bias = self.declare("bias", *outputs, std=0.0, placement=placement) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        y = F.linear(x, self.weight.flatten(0, -2), bias)
        return y.unflatten(-1, self.weight.shape[:-1])
