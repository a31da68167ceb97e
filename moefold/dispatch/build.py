"""Which dispatcher a run uses: what was asked for, the one of least predicted time, or the local one."""

from __future__ import annotations

import math
from functools import partial

from moefold.anatomy.step_specs import dispatched_width
from moefold.config.run import Config, MoeConfig
from moefold.dispatch.all_gather import AllGatherDispatcher
from moefold.dispatch.base import Dispatcher, RowPolicy
from moefold.dispatch.hop_dispatcher import build_hop_dispatcher
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.price import cheapest_dispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import BYTES_PER_ELEMENT
from moefold.layout.axes import World
from moefold.layout.dtypes import DTYPES


def expert_capacity(moe: MoeConfig, tokens: int) -> int:
    """How many of so many tokens one expert takes."""
    return math.ceil(moe.capacity.factor * tokens * moe.top_k / moe.experts)


def most_rows_per_expert(moe: MoeConfig, ranks: int, tokens: int) -> int:
    """The most rows an expert can get when each of `ranks` sends it up to its capacity, padded as asked."""
    return -(-expert_capacity(moe, tokens) * ranks // moe.capacity.pad_rows) * moe.capacity.pad_rows


def build_dispatcher(config: Config, kernels: BoundKernels, world: World) -> Dispatcher:
    moe = config.model.moe
    ep = world.axis("ep")
    name, _ = cheapest_dispatcher(config, world.node_size, BYTES_PER_ELEMENT[config.train.precision])
    held = moe.experts // ep.size
    row_policy = RowPolicy(
        ep.index * held,
        held,
        drops=moe.capacity.factor > 0 or moe.router.kind == "expert_choice",
        multiple=moe.capacity.pad_rows,
        each=partial(most_rows_per_expert, moe, world.axis("ep", "etp").size) if moe.capacity.pad else None,
    )
    if name == "local":
        return LocalDispatcher(row_policy, kernels)
    if name == "all_gather":
        return AllGatherDispatcher(row_policy, kernels, world)
    dtype = DTYPES[config.train.precision]
    return build_hop_dispatcher(name, row_policy, kernels, world, dispatched_width(config.model), dtype)
