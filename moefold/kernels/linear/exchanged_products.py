"""Dense products inside exchanges of rows over tensor-parallel ranks.

    multiply_gathered   rows -> rooms of other ranks | x_CD = own rows and room | y_CN = x W^T, for several layers
    scatter_products    y_CN = sum of x W^T over layers | rows of y -> room of their rank | y_TN = sum over ranks

Each is the gradient of the other by its input, with W in place of W^T: a weight is given as (N, D), a transposed view
too. The references do one behind the other, with the whole exchange between them. Kernels do both at a time, tile by
tile (gathered_product_triton.py, scattered_product_triton.py), and give the signals themselves.

T rows of this rank, C of all ranks, in the order of ranks; D inputs, N outputs, s ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.experts.tiles_in_exchange import do_nothing, signals_given
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def multiply_gathered(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> tuple[Tensor, ...]:
    """The products of all ranks' rows with each weight. Each `rooms[i]` is (C, D), and then has the rows of all other
    ranks."""
    x_CD = gather_rows(x_TD, rooms, exchange)
    return tuple(wide_product(x_CD, weight).to(x_TD.dtype) for weight in weights)


def gather_rows(x_TD: Tensor, rooms: list[Tensor], exchange: ProductExchange) -> Tensor:
    """(C, D): the rows of all ranks, by an exchange alone."""
    own = exchange.rows_of(exchange.me)
    for rank, room_CD in enumerate(rooms):
        if rank != exchange.me:
            room_CD[own] = x_TD
    exchange.end()
    x_CD = rooms[exchange.me].clone()
    x_CD[own] = x_TD
    return x_CD


@register_inner_op
def scatter_products(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> Tensor:
    """This rank's rows of the sum over ranks of the products, themselves summed over layers. A rank's products are
    rounded once; the sum is in fp32 or better, this rank's first and then in the order of ranks. Each `rooms[i]` is
    (s x most rows of a rank, N), by sender."""
    me = exchange.me
    products = [wide_product(x_CD, weight) for x_CD, weight in zip(inputs, weights, strict=True)]
    wide_CN = torch.stack(products).sum(0)
    dtype = inputs[0].dtype
    y_CN = wide_CN.to(dtype)
    for rank, room in enumerate(rooms):
        if rank != me:
            there = exchange._replace(me=rank).slots_of(me)
            room[there] = y_CN[exchange.rows_of(rank)]
    exchange.end()
    total_TN = y_CN[exchange.rows_of(me)].to(wide_CN.dtype)
    for rank in range(len(rooms)):
        if rank != me:
            total_TN = total_TN + rooms[me][exchange.slots_of(rank)]
    return total_TN.to(dtype)


def wide_product(x_CD: Tensor, w_ND: Tensor) -> Tensor:
    wide = torch.promote_types(x_CD.dtype, torch.float32)
    return x_CD.to(wide) @ w_ND.to(wide).T


@multiply_gathered.register_fast("triton")
def multiply_gathered_triton(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> tuple[Tensor, ...]:
    from moefold.kernels.linear.gathered_product_triton import launch_gathered_product

    return launch_gathered_product(x_TD, weights, rooms, exchange)


@scatter_products.register_fast("triton")
def scatter_products_triton(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> Tensor:
    from moefold.kernels.linear.scattered_product_triton import launch_scattered_product

    return launch_scattered_product(inputs, weights, rooms, exchange)


class ExchangedSizes(NamedTuple):
    """Rows of each rank, inputs or outputs, and the widths of layers on the other side. `turned`: weights are given as
    transposed views."""

    shards: tuple[int, ...]
    width: int
    layers: tuple[int, ...]
    turned: bool = False

    @property
    def name(self) -> str:
        rows = " + ".join(map(str, self.shards))
        layers = ", ".join(map(str, self.layers))
        return f"{rows} rows, {self.width} and {layers}{', turned' if self.turned else ''}"


EXCHANGED_SIZES = (
    ExchangedSizes((16, 16), 32, (16, 8, 8)),
    ExchangedSizes((5, 0, 70), 24, (40,), turned=True),
    ExchangedSizes((0, 0), 16, (8,)),
    ExchangedSizes((70, 70, 70), 40, (24, 16)),
    ExchangedSizes((3,), 8, (8,)),
)
FLAGS = 64


def drawn_weight(draw: CaseInputs, n: int, d: int, turned: bool, seed: int) -> Tensor:
    """(N, D)."""
    scale = d**-0.5
    if turned:
        return draw.normal(d, n, seed=seed, scale=scale).T
    return draw.normal(n, d, seed=seed, scale=scale)


def drawn_exchange(draw: CaseInputs, sizes: ExchangedSizes) -> ProductExchange:
    """That of the last rank, whose signals have all been given."""
    ranks = len(sizes.shards)
    me = ranks - 1
    signals = signals_given(ranks, ranks * FLAGS, me, torch.device(draw.device))
    return ProductExchange(me, sizes.shards, do_nothing, signals, FLAGS)


@multiply_gathered.register_cases
def multiply_gathered_cases(draw: CaseInputs) -> Cases:
    for sizes in EXCHANGED_SIZES:
        exchange = drawn_exchange(draw, sizes)
        rooms = [draw.normal(exchange.rows, sizes.width, seed=7) for _ in sizes.shards]
        x_TD = draw.normal(sizes.shards[exchange.me], sizes.width)
        weights = [drawn_weight(draw, n, sizes.width, sizes.turned, seed) for seed, n in enumerate(sizes.layers)]
        yield KernelCase(sizes.name, (x_TD, weights, rooms, exchange))


@scatter_products.register_cases
def scatter_products_cases(draw: CaseInputs) -> Cases:
    for sizes in EXCHANGED_SIZES:
        exchange = drawn_exchange(draw, sizes)
        slots = len(sizes.shards) * max(sizes.shards)
        rooms = [draw.normal(slots, sizes.width, seed=7) for _ in sizes.shards]
        inputs = [draw.normal(exchange.rows, d, seed=seed) for seed, d in enumerate(sizes.layers)]
        weights = [drawn_weight(draw, sizes.width, d, sizes.turned, seed) for seed, d in enumerate(sizes.layers)]
        yield KernelCase(sizes.name, (inputs, weights, rooms, exchange))
