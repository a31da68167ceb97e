"""Bytes that attention sends under tensor parallelism and under all-to-all context parallelism ("SP attention")."""

from __future__ import annotations

from collections import Counter

import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.run import AttentionConfig, Config, ModelConfig, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, create_world
from moefold.model.attention.context_parallel import choose_context_mechanism
from moefold.model.block import ATTENTION_KINDS
from moefold.model.initialise import initialise_parameters
from moefold.model.parts import ModelParts
from moefold.model.token_layout import TokenShard
from moefold.train.assemble import make_tp_projections
from tests.support.models import attend
from tests.support.ranks import run_ranks

N, BATCH, LENGTH, HIDDEN = 4, 2, 32, 64
MODEL = ModelConfig(hidden=HIDDEN, attention=AttentionConfig(heads=8, kv_heads=4, head_dim=8))
M = 2  # query heads for each key/value head
MLA = AttentionConfig(
    kind="mla", heads=8, kv_heads=8, head_dim=12, rope_dim=4, value_dim=6, q_rank=10, kv_rank=14, sinks=True
)
LATENT = ModelConfig(hidden=HIDDEN, attention=MLA)
NODE = 2  # ranks


def sent(world: World, model: ModelConfig, parallel: ParallelConfig) -> Counter[tuple[str, str]]:
    world = create_world(world.rank, world.size, world.device, parallel, node_size=NODE)
    kernels = BoundKernels(Facts("cpu", "fp32", hidden=HIDDEN))
    context = choose_context_mechanism(parallel.context, kernels, world)
    over_tp = make_tp_projections(Config(), world, kernels)
    made = ModelParts(world, kernels, None, {world.cp.size: context}, over_tp, LENGTH)  # pyright: ignore
    attention = ATTENTION_KINDS[model.attention.kind](model, 0, made)
    initialise_parameters(attention, seed=1)
    share = TokenShard(BATCH, LENGTH, world.axis("cp"), world.axis("tp"), torch.device("cpu"))
    with counted_bytes_sent() as counter, torch.no_grad():
        attend(attention, torch.zeros(BATCH * LENGTH // N, HIDDEN), share)
    return counter


def test_both_send_exactly_what_their_formulas_say():
    """TP gathers and scatters b s h, 2 b s h (n-1)/n in all; SP swaps q, k, v and y of b s h / n each, k and v being m
    times smaller: (2 + 2/m)/n times b s h (n-1)/n."""
    whole = BATCH * LENGTH * HIDDEN * 4 * (N - 1) / N
    for counter in run_ranks(sent, N, MODEL, ParallelConfig(tp=N)):
        assert sum(counter.values()) == 2 * whole
    for counter in run_ranks(sent, N, MODEL, ParallelConfig(cp=N, context="all_to_all")):
        assert sum(counter.values()) == whole * (2 + 2 / M) / N


def test_latent_attention_gathers_its_latents_and_swaps_heads_of_their_own_widths():
    """Under TP the latents are gathered, which are narrower than the stream, and the stream is scattered. Under SP
    queries and keys have one width, values and results another."""
    token = BATCH * LENGTH * 4 * (N - 1) / N
    for counter in run_ranks(sent, N, LATENT, ParallelConfig(tp=N)):
        gathered = sum(n for (what, _), n in counter.items() if what == "gather")
        assert gathered == token * (MLA.q_rank + MLA.kv_rank + MLA.rope_dim)
        assert sum(counter.values()) == gathered + token * HIDDEN
    for counter in run_ranks(sent, N, LATENT, ParallelConfig(cp=N, context="all_to_all")):
        assert sum(counter.values()) == token * MLA.heads * 2 * (MLA.head_dim + MLA.value_dim) / N
