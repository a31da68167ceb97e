"""Precision recipes that no run uses: they show that nothing in the products is made for the plain one alone."""

from __future__ import annotations

from typing import Any

import torch

from moefold.kernels.linear.product import ExpertRows, KeptOperand, Operand, Products


class RoundedRecipe:
    """Operands rounded to bf16, held in the type they came in: y is exactly what autograd has of rounded tensors."""

    name = "rounded"
    keeps: KeptOperand = "rows"
    row_multiple = 1
    rounds_by_token = False
    products: Products | None = None

    @property
    def input_maker(self) -> object:
        return self

    def input(self, x: torch.Tensor, rows: ExpertRows | None = None) -> Operand:
        return Operand(x.bfloat16().to(x.dtype))

    def weight(self, w: torch.Tensor) -> Operand:
        return self.input(w.detach())

    def gradient(self, dy: torch.Tensor, rows: Any = None, number_R: Any = None) -> Operand:
        return self.input(dy)

    def state(self) -> dict[str, torch.Tensor]:
        return {}


class BlockScaledRecipe:
    """Rows of integers with a power of two for every four columns; and along columns, one for every two rows. The input
    of the weight gradient is kept along columns only, so it differs from what forward reads."""

    name = "block_scaled"
    row_multiple = 2
    rounds_by_token = False
    products: Products | None = None

    def __init__(self, keeps: KeptOperand = "columns"):
        self.keeps: KeptOperand = keeps

    @property
    def input_maker(self) -> object:
        return self

    def input(self, x: torch.Tensor, rows: ExpertRows | None = None) -> Operand:
        rows = self.quantised(x, 1, 4)
        columns = self.quantised(x, 2, 1)
        return rows._replace(columns=columns)

    def weight(self, w: torch.Tensor) -> Operand:
        return self.quantised(w.detach(), 1, 4)

    def gradient(self, dy: torch.Tensor, rows: Any = None, number_R: Any = None) -> Operand:
        return self.input(dy)

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def quantised(self, x: torch.Tensor, row_block: int, column_block: int) -> Operand:
        """Blocks of the last two dims; a border may cut the last ones short."""
        scales = torch.nn.functional.max_pool2d(
            x.abs().reshape(-1, 1, *x.shape[-2:]), (row_block, column_block), ceil_mode=True
        )
        scales = (scales.reshape(*x.shape[:-2], *scales.shape[-2:]) / 64).log2().ceil().exp2().clamp(min=2.0**-20)
        ones = Operand(torch.ones_like(x), scales).dequantised()
        return Operand((x / ones).round().to(torch.int8), scales)


class DelayedScaleRecipe(RoundedRecipe):
    """Scales inputs by the largest one seen so far, which is state: one object for each product."""

    name = "delayed_scale"

    def __init__(self):
        self.input_maximum = torch.zeros(1)

    def input(self, x: torch.Tensor, rows: ExpertRows | None = None) -> Operand:
        torch.maximum(self.input_maximum, x.detach().abs().max().float(), out=self.input_maximum)
        scale = self.input_maximum.to(x.dtype).log2().ceil().exp2().reshape([1] * x.dim())
        return Operand(x / scale, scale)

    def weight(self, w: torch.Tensor) -> Operand:
        return Operand(w.detach())

    def gradient(self, dy: torch.Tensor, rows: Any = None, number_R: Any = None) -> Operand:
        return Operand(dy)

    def state(self) -> dict[str, torch.Tensor]:
        return {"input_maximum": self.input_maximum}
