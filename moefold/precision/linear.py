"""The linear layer every dense projection is made of: where a precision recipe will act."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from moefold.kernels.linear.linear import linear
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import REPLICATED, Placement

Products = Callable[
    ..., tuple[torch.Tensor, ...]
]  # of x with weight, bias, weight, bias, ... (kernels/linear/linear.py)


class Linear(DeclaringModule):
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
        self.weight = self.declare_parameter("weight", *outputs, inputs, std=std, placement=placement)
        summand = placement.sharded_dims == (len(outputs),)
        self.bias_factor = 0.0 if summand and world.axis("tp").index > 0 else 1.0
        bias_placement = REPLICATED if summand else placement
        self.bias = self.declare_parameter("bias", *outputs, std=0.0, placement=bias_placement) if bias else None
        self.products: Products = linear.reference

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = products_of_layers(x, self)
        return y

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = self.bias.flatten() * self.bias_factor if self.bias is not None else None
        return self.weight.flatten(0, -2), bias


class LinearGroup(DeclaringModule):
    """Linear layers that read the same input, called as one: what they give back for it need not be added apart. They
    are members of whoever made them, and keep their names."""

    def __init__(self, world: World, *layers: Linear):
        super().__init__(world)
        self.layers = layers  # a tuple: they are not this module's own
        self.borrowed = tuple(parameter for layer in layers for parameter in layer.parameters())

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return products_of_layers(x, *self.layers)


def products_of_layers(x: torch.Tensor, *layers: Linear) -> list[torch.Tensor]:
    results = layers[0].products(x, *(operand for layer in layers for operand in layer.weight_and_bias()))
    return [y.unflatten(-1, layer.weight.shape[:-1]) for y, layer in zip(results, layers, strict=True)]


def set_linear_products(model: nn.Module, products: Products) -> None:
    """Of every linear layer, from now on."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.products = products
