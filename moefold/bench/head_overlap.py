"""Projections of ranks that share sequences, inside exchanges of positions for heads, in `moefold bench overlap
--device cuda --products heads`: those before attention while heads leave, and that behind it while heads arrive, both
played on one GPU (bench/played_products.py). Every rank has all weights, in memory of its own."""

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
from moefold.dispatch.room_sizes import flags_of_heads
from moefold.dispatch.tiled_heads import TiledHeads
from moefold.kernels.linear.swapped_products import project_from_heads, project_to_heads


class PlayedHeads(PlayedProducts[TiledHeads]):
    """Projections to and from the heads of all ranks, their inputs and weights."""

    def __init__(self, sizes: ProjectionSizes, setting: PlayedSetting):
        tokens, ranks = setting.tokens, setting.ranks
        shares = [width // ranks for width in sizes.heads]
        flags = flags_of_heads(tokens, shares)
        self.widest = max(sum(sizes.heads), sizes.joined)
        super().__init__(TiledHeads, sizes, setting, flags, tokens * self.widest)
        for each in self.products:
            each.project_to_heads = project_to_heads.implementations["triton"]
            each.project_from_heads = project_from_heads.implementations["triton"]
        scale = sizes.hidden**-0.5
        weights = [self.drawn(n, sizes.hidden, seed=20 + n, scale=scale) for n in sizes.heads]
        out = self.drawn(sizes.hidden, sizes.joined, seed=30, scale=scale)
        self.weights = [[weight.clone() for weight in weights] for _ in range(ranks)]
        self.out = [out.clone() for _ in range(ranks)]
        self.x_TD = [self.drawn(tokens, sizes.hidden, seed=rank) for rank in range(ranks)]
        part = sizes.joined // ranks
        self.inputs = [self.drawn(tokens * ranks, part, seed=10 + rank) for rank in range(ranks)]

    # Results as they have to be.

    def heads(self, rank: int) -> list[Tensor]:
        x_CD = torch.cat(self.x_TD).float()
        return [x_CD @ weight.chunk(self.ranks)[rank].float().T for weight in self.weights[rank]]

    def joined(self, rank: int) -> list[Tensor]:
        x_TK = self.arrived(rank).float()
        return [x_TK @ self.out[rank].float().T]

    def arrived(self, rank: int) -> Tensor:
        mine = self.rows_of(rank)
        return torch.cat([x_CH[mine] for x_CH in self.inputs], 1)

    # Launches of one rank.

    def to_heads(self, rank: int) -> list[Tensor]:
        return list(self.products[rank].make_heads(self.x_TD[rank], self.weights[rank], self.shards))

    def from_heads(self, rank: int) -> list[Tensor]:
        return [self.products[rank].join_heads([self.inputs[rank]], [self.out[rank]], self.shards).y_TN]


def measure_to_heads(played: PlayedHeads, run: TileRun, repeat: int) -> OverlapFigures:
    from moefold.kernels.linear.to_heads_triton import bind_to_heads

    width = sum(played.sizes.heads)
    made = [x.new_zeros(len(x), width) for x in played.x_TD]

    def bind(rank: int):
        rooms = played.arena(rank).rooms(sum(played.shards), width // played.ranks, played.dtype)
        inputs = (played.x_TD[rank], played.weights[rank])
        return bind_to_heads(*inputs, rooms, played.exchange(rank), None, made[rank])

    def exchange_alone(rank: int) -> None:
        bind(rank).run(multiplies=False)

    def product_alone(rank: int) -> None:
        bind(rank).run(sends=False, keeps=False)

    product = played.least_span(run, repeat, product_alone, GIVEN)
    exchange = played.least_span(run, repeat, exchange_alone, 0)
    return played.measure_together(played.to_heads, run, repeat, exchange, product)


def measure_from_heads(played: PlayedHeads, run: TileRun, repeat: int) -> OverlapFigures:
    from moefold.kernels.linear.from_heads_triton import bind_from_heads

    def bind(rank: int):
        rooms = played.arena(rank).rooms(max(played.shards), played.sizes.joined, played.dtype)
        return bind_from_heads([played.inputs[rank]], [played.out[rank]], rooms, played.exchange(rank))

    def exchange_alone(rank: int) -> None:
        bind(rank).run(run.programs, multiplies=False)

    def product_alone(rank: int) -> None:
        bind(rank).run(run.programs, sends=False)

    all_send = run._replace(senders=run.programs - 1)
    exchange = played.least_span(all_send, repeat, exchange_alone, 0)
    product = played.least_span(run, repeat, product_alone, GIVEN)
    return played.measure_together(played.from_heads, run, repeat, exchange, product)


def to_heads_apart(played: PlayedHeads) -> None:
    made = [[torch.mm(x, weight.T) for weight in played.weights[0]] for x in played.x_TD]
    for rank in range(played.ranks):
        for layer in zip(*made, strict=True):
            torch.cat([y_TK.chunk(played.ranks, 1)[rank] for y_TK in layer])


def from_heads_apart(played: PlayedHeads) -> None:
    for rank in range(played.ranks):
        torch.mm(played.arrived(rank), played.out[rank].T)


def measure_heads(
    options: OverlapOptions,
    name: str,
    sizes: ProjectionSizes,
    setting: PlayedSetting,
    programs: int,
) -> Iterator[Row]:
    repeat = options.repeat
    played = PlayedHeads(sizes, setting)
    apart = least_time(partial(to_heads_apart, played), repeat)
    figures = measure_to_heads(played, TileRun(programs, 1, False), repeat)
    yield figure_row(name, "to heads", programs, figures, apart)
    apart = least_time(partial(from_heads_apart, played), repeat)
    for senders in options.senders:
        figures = measure_from_heads(played, TileRun(programs, senders, False), repeat)
        yield figure_row(name, "from heads", senders, figures, apart)


def run_head_benchmark(options: OverlapOptions) -> int:
    return run_product_benchmark(options, measure_heads)
