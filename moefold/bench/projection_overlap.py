"""Projections of tensor-parallel ranks inside exchanges, in `moefold bench overlap --device cuda --products
projections`: those before attention while rows are gathered, and that behind it while sums are scattered, both played
on one GPU (bench/played_products.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from moefold.bench.concurrent_ranks import GIVEN, TileRun
from moefold.bench.options import OverlapOptions
from moefold.bench.played_products import (
    OverlapFigures,
    PlayedProducts,
    PlayedSetting,
    ProjectionSizes,
    figure_row,
    least_time,
    run_product_benchmark,
)
from moefold.bench.report import Row
from moefold.dispatch.room_sizes import flags_of_sender
from moefold.dispatch.tiled_projections import TiledProjections
from moefold.kernels.linear.exchanged_products import multiply_gathered, scatter_products


class PlayedProjections(PlayedProducts[TiledProjections]):
    """Projections of all ranks, their inputs and weights."""

    def __init__(self, sizes: ProjectionSizes, setting: PlayedSetting):
        tokens, ranks = setting.tokens, setting.ranks
        rows = tokens * ranks
        flags = flags_of_sender(tokens, sizes.hidden)
        super().__init__(TiledProjections, sizes, setting, flags, rows * sizes.hidden)
        for each in self.products:
            each.multiply_gathered = multiply_gathered.implementations["triton"]
            each.scatter_products = scatter_products.implementations["triton"]
        part = sizes.joined // ranks
        self.x_TD = [self.drawn(tokens, sizes.hidden, seed=rank) for rank in range(ranks)]
        self.inputs = [self.drawn(rows, part, seed=10 + rank) for rank in range(ranks)]
        scale = sizes.hidden**-0.5
        self.weights = [self.draw_weights(rank, scale) for rank in range(ranks)]
        self.out = [self.drawn(sizes.hidden, part, seed=30 + rank, scale=scale) for rank in range(ranks)]

    def draw_weights(self, rank: int, scale: float) -> list[Tensor]:
        widths = [width // self.ranks for width in self.sizes.heads]
        return [
            self.drawn(width, self.sizes.hidden, seed=20 + 4 * rank + layer, scale=scale)
            for layer, width in enumerate(widths)
        ]

    # Results as they have to be.

    def gathered(self, rank: int) -> list[Tensor]:
        x_CD = torch.cat(self.x_TD).float()
        return [x_CD @ weight.float().T for weight in self.weights[rank]]

    def summed(self, rank: int) -> list[Tensor]:
        mine = self.rows_of(rank)
        parts = [x[mine].float() @ w.float().T for x, w in zip(self.inputs, self.out, strict=True)]
        return [torch.stack(parts).sum(0)]

    # Launches of one rank.

    def gather(self, rank: int) -> list[Tensor]:
        outputs, _ = self.products[rank].multiply(self.x_TD[rank], self.weights[rank], self.shards)
        return list(outputs)

    def scatter(self, rank: int) -> list[Tensor]:
        return [self.products[rank].multiply_and_sum([self.inputs[rank]], [self.out[rank]], self.shards)]


def measure_gather(played: PlayedProjections, run: TileRun, repeat: int) -> OverlapFigures:
    from moefold.kernels.linear.gathered_product_triton import bind_gathered_product

    def bind(rank: int):
        rooms = played.arena(rank).rooms(sum(played.shards), played.sizes.hidden, played.dtype)
        return bind_gathered_product(played.x_TD[rank], played.weights[rank], rooms, played.exchange(rank))

    def exchange_alone(rank: int) -> None:
        bind(rank).run(run.programs, multiplies=False)

    def product_alone(rank: int) -> None:
        bind(rank).run(run.programs, sends=False)

    all_send = run._replace(senders=run.programs - 1)
    exchange = played.least_span(all_send, repeat, exchange_alone, 0)
    product = played.least_span(run, repeat, product_alone, GIVEN)
    return played.measure_together(played.gather, run, repeat, exchange, product)


def measure_scatter(played: PlayedProjections, run: TileRun, repeat: int) -> OverlapFigures:
    from moefold.kernels.linear.scattered_product_triton import bind_scattered_product

    kept = [torch.empty_like(torch.cat(played.x_TD)) for _ in range(played.ranks)]

    def bind(rank: int):
        slots = sum(played.shards)
        rooms = played.arena(rank).rooms(slots, played.sizes.hidden, played.dtype)
        inputs, weights = [played.inputs[rank]], [played.out[rank]]
        return bind_scattered_product(inputs, weights, rooms, played.exchange(rank), None, kept[rank])

    def exchange_alone(rank: int) -> None:
        bind(rank).run(multiplies=False)

    def product_alone(rank: int) -> None:
        bind(rank).run(sends=False, sums=False)

    product = played.least_span(run, repeat, product_alone, GIVEN)
    exchange = played.least_span(run, repeat, exchange_alone, 0)
    return played.measure_together(played.scatter, run, repeat, exchange, product)


def gather_apart(played: PlayedProjections) -> None:
    for rank in range(played.ranks):
        x_CD = torch.cat(played.x_TD)
        for weight in played.weights[rank]:
            torch.mm(x_CD, weight.T)


def scatter_apart(played: PlayedProjections) -> None:
    products = [torch.mm(x, w.T) for x, w in zip(played.inputs, played.out, strict=True)]
    for rank in range(played.ranks):
        slots = torch.stack([y_CN[played.rows_of(rank)] for y_CN in products])
        slots.sum(0)


def measure_projections(
    options: OverlapOptions,
    name: str,
    sizes: ProjectionSizes,
    setting: PlayedSetting,
    programs: int,
) -> Iterator[Row]:
    repeat = options.repeat
    played = PlayedProjections(sizes, setting)
    apart = least_time(partial(gather_apart, played), repeat)
    for senders in options.senders:
        figures = measure_gather(played, TileRun(programs, senders, False), repeat)
        yield figure_row(name, "gathered", senders, figures, apart)
    apart = least_time(partial(scatter_apart, played), repeat)
    figures = measure_scatter(played, TileRun(programs, 1, False), repeat)
    yield figure_row(name, "scattered", programs, figures, apart)


def run_projection_benchmark(options: OverlapOptions) -> int:
    return run_product_benchmark(options, measure_projections)
