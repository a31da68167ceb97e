"""Matrix products of torch, as every reference takes them.

matmul          a b. A CPU without instructions for 16-bit numbers multiplies them in fp32 and rounds the result:
                torch's own products of bf16 matrices take 100 to 300 times as long there.
tiled_product   x W^T of which a row's bits do not depend on the other rows (`kernels.invariant`). A matrix product
                chooses its kernel by its shape: torch multiplies one row otherwise than two, and libraries may
                split sums otherwise for many rows than for few. So rows are multiplied in tiles of one size, the
                last one filled with zeros: all calls have the same shape, whatever the number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.linear.product import widened

ROW_TILE = 64


def matmul(a: Tensor, b: Tensor) -> Tensor:
    product = widened(a) @ widened(b)
    return product.to(a.dtype)


def add_matmul(x: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """beta x + alpha a b, of matrices or of batches of them."""
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    total = add(widened(x), widened(a), widened(b), beta=beta, alpha=alpha)
    return total.to(x.dtype)


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    wide_a = widened(a)
    if wide_a is a:
        torch.mm(a, b, out=out)
    else:
        out.copy_(wide_a @ widened(b))


def plain_product(x_RD: Tensor, w_ND: Tensor) -> Tensor:
    return matmul(x_RD, w_ND.mT)


def tiled_product(x_RD: Tensor, w_ND: Tensor) -> Tensor:
    """y_RN = x W^T, differentiable."""
    rows = len(x_RD)
    missing = -rows % ROW_TILE
    padded = F.pad(x_RD, (0, 0, 0, missing))
    padded = padded.contiguous()
    if not len(padded):
        return plain_product(x_RD, w_ND)
    tiles = padded.split(ROW_TILE)
    products = [plain_product(tile, w_ND) for tile in tiles]
    y_PN = torch.cat(products)
    return y_PN[:rows]
