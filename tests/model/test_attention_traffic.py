"""Bytes that attention sends under tensor parallelism and under all-to-all context parallelism ("SP attention")."""

from __future__ import annotations

from collections import Counter

import torch

from moefold.comm.traffic import counted
from moefold.config.run import AttentionConfig, ModelConfig, ParallelConfig
from moefold.kernels.bind import bind
from moefold.kernels.catalog import Facts
from moefold.layout.axes import World, name_axes
from moefold.model.attention.context import choose_context
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.choices import Choices
from moefold.model.initialise import initialise
from moefold.model.share import Share
from tests.support.ranks import run_ranks

N, BATCH, LENGTH, HIDDEN = 4, 2, 32, 64
MODEL = ModelConfig(hidden=HIDDEN, attention=AttentionConfig(heads=8, kv_heads=4, head_dim=8))
M = 2  # query heads for each key/value head


def sent(world: World, parallel: ParallelConfig) -> Counter[tuple[str, str]]:
    world = name_axes(world.rank, world.size, world.device, parallel)
    kernels = bind(Facts("cpu", "fp32", hidden=HIDDEN))
    context = choose_context(parallel.context, kernels, world)
    attention = GroupedQueryAttention(MODEL, Choices(world, kernels, None, context, LENGTH))  # pyright: ignore
    initialise(attention, seed=1)
    share = Share(BATCH, LENGTH, world.axis("cp"), world.axis("tp"), torch.device("cpu"))
    with counted() as counter, torch.no_grad():
        attention(torch.zeros(BATCH * LENGTH // N, HIDDEN), share)
    return counter


def test_both_send_exactly_what_their_formulas_say():
    """TP gathers and scatters b s h, 2 b s h (n-1)/n in all; SP swaps q, k, v and y of b s h / n each, k and v being m
    times smaller: (2 + 2/m)/n times b s h (n-1)/n."""
    whole = BATCH * LENGTH * HIDDEN * 4 * (N - 1) / N
    for counter in run_ranks(sent, N, ParallelConfig(tp=N)):
        assert sum(counter.values()) == 2 * whole
    for counter in run_ranks(sent, N, ParallelConfig(cp=N, context="all_to_all")):
        assert sum(counter.values()) == whole * (2 + 2 / M) / N
