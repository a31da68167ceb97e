"""Dense products inside exchanges of positions for heads, over ranks that share sequences: before and behind attention
by all-to-all.

    project_to_heads     y = x W^T     heads of y -> room of their rank | y_CH of all rows, for several layers
    project_from_heads   rows of x_CH -> room of their rank | y_TN = x W^T over the heads of all ranks and all layers

Each is the gradient of the other by its input, with W in place of W^T: a weight is given as (N, K), a transposed view
too, and every rank has all of it. Heads of a rank are its even share of the columns of a layer, in the order of ranks.
The references do one behind the other, with the whole exchange between them. Kernels do both at a time, tile by tile
(to_heads_triton.py, from_heads_triton.py), and give the signals themselves.

T rows of this rank, C of all ranks, in the order of ranks; D inputs, N outputs, H columns of a rank's heads, s ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.kernels.linear.exchanged_products import ExchangedSizes, drawn_exchange, drawn_weight, wide_product
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def project_to_heads(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> tuple[Tensor, ...]:
    """This rank's heads of each layer (s x H, D) for the rows of all ranks. Each `rooms[i]` is (C, sum of H), layers
    side by side, and then has what all other ranks have made."""
    me = exchange.me
    own = exchange.rows_of(me)
    products = [wide_product(x_TD, weight).to(x_TD.dtype) for weight in weights]
    for rank, room in enumerate(rooms):
        if rank != me:
            room[own] = torch.cat([exchange.heads_of(y, rank) for y in products], 1)
    exchange.end()
    widths = [len(weight) // len(rooms) for weight in weights]
    outputs = [heads.clone() for heads in rooms[me].split(widths, 1)]
    for y_CH, y in zip(outputs, products, strict=True):
        y_CH[own] = exchange.heads_of(y, me)
    return tuple(outputs)


@register_inner_op
def project_from_heads(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> Tensor:
    """The products of this rank's rows with each layer (N, s x H), summed over layers. The sum is in fp32 or better:
    this rank's heads first, then those of the next rank, and so on. Each `rooms[i]` is (most rows of a rank, s x sum of
    H), layers side by side, and then has the heads of all other ranks."""
    me = exchange.me
    ranks = len(rooms)
    for rank in range(ranks):
        if rank != me:
            arriving = exchange.arrived_layers(rooms[rank], inputs, rank)
            for x_CH, x in zip(inputs, arriving, strict=True):
                exchange.heads_of(x, me).copy_(x_CH[exchange.rows_of(rank)])
    exchange.end()
    arrived = exchange.arrived_layers(rooms[me], inputs, me)
    own = exchange.rows_of(me)
    summands: list[Tensor] = []
    for turn in range(ranks):
        rank = (me + turn) % ranks
        for x_CH, x, weight in zip(inputs, arrived, weights, strict=True):
            x_TH = exchange.heads_of(x, rank) if turn else x_CH[own]
            summands.append(wide_product(x_TH, exchange.heads_of(weight, rank)))
    total_TN = sum(summands[1:], summands[0])
    return total_TN.to(inputs[0].dtype)


@project_to_heads.register_fast("triton")
def project_to_heads_triton(
    x_TD: Tensor,
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> tuple[Tensor, ...]:
    from moefold.kernels.linear.to_heads_triton import launch_to_heads

    return launch_to_heads(x_TD, weights, rooms, exchange)


@project_from_heads.register_fast("triton")
def project_from_heads_triton(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rooms: list[Tensor],
    exchange: ProductExchange,
) -> Tensor:
    from moefold.kernels.linear.from_heads_triton import launch_from_heads

    return launch_from_heads(inputs, weights, rooms, exchange)


# `layers`: columns of one rank's heads
SWAPPED_SIZES = (
    ExchangedSizes((16, 16), 32, (32, 16, 16)),
    ExchangedSizes((5, 0, 35), 24, (20,), turned=True),
    ExchangedSizes((33, 5, 0), 7, (3, 5)),
    ExchangedSizes((35, 35, 35), 24, (8, 8)),
    ExchangedSizes((3,), 8, (8,)),
)


@project_to_heads.register_cases
def project_to_heads_cases(draw: CaseInputs) -> Cases:
    for sizes in SWAPPED_SIZES:
        exchange = drawn_exchange(draw, sizes)
        ranks = len(sizes.shards)
        rooms = [draw.normal(exchange.rows, sum(sizes.layers), seed=7) for _ in sizes.shards]
        x_TD = draw.normal(sizes.shards[exchange.me], sizes.width)
        widths = [ranks * share for share in sizes.layers]
        weights = [drawn_weight(draw, n, sizes.width, sizes.turned, seed) for seed, n in enumerate(widths)]
        yield KernelCase(sizes.name, (x_TD, weights, rooms, exchange))


@project_from_heads.register_cases
def project_from_heads_cases(draw: CaseInputs) -> Cases:
    for sizes in SWAPPED_SIZES:
        exchange = drawn_exchange(draw, sizes)
        widths = [len(sizes.shards) * share for share in sizes.layers]
        rooms = [draw.normal(max(sizes.shards), sum(widths), seed=7) for _ in sizes.shards]
        inputs = [draw.normal(exchange.rows, share, seed=seed) for seed, share in enumerate(sizes.layers)]
        weights = [drawn_weight(draw, sizes.width, k, sizes.turned, seed) for seed, k in enumerate(widths)]
        yield KernelCase(sizes.name, (inputs, weights, rooms, exchange))
