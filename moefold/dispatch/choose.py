"""Which dispatcher a run uses: what was asked for, the one of least predicted time, or the local one."""

from __future__ import annotations

import math
from functools import partial

from moefold.anatomy.steps import travelling_width
from moefold.config.run import Config, MoeConfig
from moefold.dispatch.all_gather import AllGatherDispatcher
from moefold.dispatch.base import Dispatcher, Rowing
from moefold.dispatch.hops import made_of_hops
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.price import choose
from moefold.kernels.bind import Kernels
from moefold.kernels.catalog import BYTES
from moefold.kernels.registry import DTYPES
from moefold.layout.axes import World


def capacity(moe: MoeConfig, tokens: int) -> int:
    """How many of so many tokens one expert takes."""
    return math.ceil(moe.capacity_factor * tokens * moe.top_k / moe.experts)


def rows_each(moe: MoeConfig, ranks: int, tokens: int) -> int:
    """The most rows an expert can get when each of `ranks` sends it up to its capacity, padded as asked."""
    return -(-capacity(moe, tokens) * ranks // moe.pad_rows) * moe.pad_rows


def choose_dispatcher(config: Config, kernels: Kernels, world: World) -> Dispatcher:
    moe = config.model.moe
    ep = world.axis("ep")
    name, _ = choose(config, world.node_size, BYTES[config.train.precision])
    held = moe.experts // ep.size
    rowing = Rowing(
        ep.index * held,
        held,
        drops=moe.capacity_factor > 0 or moe.router == "expert_choice",
        multiple=moe.pad_rows,
        each=partial(rows_each, moe, world.axis("ep", "etp").size) if moe.pad_to_capacity else None,
    )
    if name == "local":
        return LocalDispatcher(rowing, kernels)
    if name == "all_gather":
        return AllGatherDispatcher(rowing, kernels, world)
    dtype = DTYPES[config.train.precision]
    return made_of_hops(name, rowing, kernels, world, travelling_width(config.model), dtype)
