"""The linear layer every dense projection is made of: where a precision recipe will act."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from moefold.layout.axes import World
from moefold.layout.declare import Declaring
from moefold.layout.placement import REPLICATED, Placement

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Linear(Declaring):
    """y = x W^T + b. With `outputs` of several sizes, such as (2, F), the result has them as its last dims.

    Cut over tp along an output dim, each rank makes its part of y, bias included. Cut along the inputs (the last dim),
    each rank makes a summand of y; the first adds the whole bias, so that the sum holds it once.
    """

    def __init__(
        self,
        world: World,
        inputs: int,
        *outputs: int,
        bias: bool = False,
        std: float,
        placement: Placement = REPLICATED,
    ):
        super().__init__(world)
        self.weight = self.declare("weight", *outputs, inputs, std=std, placement=placement)
        summand = placement.cut_dims == (len(outputs),)
        self.bias_times = 0.0 if summand and world.axis("tp").index > 0 else 1.0
        bias_placement = REPLICATED if summand else placement
        self.bias = self.declare("bias", *outputs, std=0.0, placement=bias_placement) if bias else None
        self.product: Product = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias.flatten() * self.bias_times if self.bias is not None else None
        y = self.product(x, self.weight.flatten(0, -2), bias)
        return y.unflatten(-1, self.weight.shape[:-1])
