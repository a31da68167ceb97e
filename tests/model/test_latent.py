"""Experts in a latent: what travels is narrower, exactly as much as the latent is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, create_world
from moefold.model.block import MoeBlock, make_transformer_block
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.layer import MoeSublayer
from moefold.model.norm import ResidualStream
from moefold.model.steps import Carry
from tests.support.models import choices, share
from tests.support.ranks import run_ranks

N, SEQUENCES, LENGTH, HIDDEN = 4, 2, 16, 32
DISPATCHERS = ("all_gather", "all_to_all", "dedup", "hierarchical")
WIDTHS = (HIDDEN, 16, 8)  # the first is no latent at all
MODEL = ModelConfig(
    layers=1,
    hidden=HIDDEN,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8),
    moe=MoeConfig(experts=8, top_k=2, ffn=16, shared_ffn=16),
)


def block_of(width: int, world: World, parallel: ParallelConfig) -> MoeBlock:
    model = replace(MODEL, moe=replace(MODEL.moe, latent=0 if width == HIDDEN else width))
    kernels = BoundKernels(Facts("cpu", "fp32", hidden=width, ffn=16))
    block = make_transformer_block(model, 0, choices(model, LENGTH, kernels, world, parallel))
    initialise_parameters(block, seed=1)
    assert isinstance(block, MoeBlock)
    return block


def moved(world: World) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Bytes this rank sends in dispatch, in combine, and in the backward of both. Every width sees the same routing:
    it is imposed, uneven, and some of it stays here. What is said about the tokens before they travel is not counted:
    it is as much for any width."""
    found = {}
    for dispatcher in DISPATCHERS:
        parallel = ParallelConfig(ep=N, dispatcher=dispatcher)
        here = create_world(world.rank, world.size, world.device, parallel, node_size=2)
        for width in WIDTHS:
            block = block_of(width, here, parallel)
            carry: Carry = {
                "stream": ResidualStream(torch.randn(SEQUENCES * LENGTH, HIDDEN).requires_grad_()),
                "token_shard": share(SEQUENCES, LENGTH, here),
                "imposed": {0: choices_of(world.rank)},
                "aux": torch.zeros(()),
            }
            found[dispatcher, width] = out, back, _ = travel(block.moe, block.route(block.attend(carry)))
            block(carry)
            assert block.moe.router.load.moved == out + back, "what the block notes is what is sent"
    return found


def choices_of(rank: int) -> torch.Tensor:
    """The experts that a rank's tokens visit: (B, S, K)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(SEQUENCES, LENGTH, 8, generator=generator).argsort(dim=-1)[..., :2]


def travel(moe: MoeSublayer, carry: Carry) -> tuple[int, int, int]:
    receipt, h_TD = moe.dispatcher.plan(carry["routing"]), carry["h_TD"]
    travelling = moe.narrow(h_TD) if hasattr(moe, "narrow") else h_TD
    with counted_bytes_sent() as out:
        rows = moe.dispatcher.dispatch(travelling, receipt)
    y_RD = moe.experts(rows)
    with counted_bytes_sent() as back:
        y_TD = moe.dispatcher.combine(y_RD, receipt)
    with counted_bytes_sent() as gradients:
        y_TD.square().sum().backward()
    assert travelling.shape == y_TD.shape
    return sum(out.values()), sum(back.values()), sum(gradients.values())


@cache
def on_ranks():
    return run_ranks(moved, N, ep=N)


@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_latent_alpha_times_narrower_moves_exactly_alpha_times_fewer_bytes(dispatcher: str, width: int):
    alpha = HIDDEN // width
    for rank, found in enumerate(on_ranks()):
        plain, latent = found[dispatcher, HIDDEN], found[dispatcher, width]
        assert plain[0] > 0
        assert plain[1] > 0
        assert [alpha * n for n in latent[:2]] == list(plain[:2]), f"rank {rank}"


@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_their_gradients_move_alpha_times_fewer_bytes_too(dispatcher: str, width: int):
    """Beside the tokens' gradients those of the gates travel, as many for any width: what two widths differ by is
    tokens alone."""
    alpha = HIDDEN // width
    for found in on_ranks():
        plain, latent = found[dispatcher, HIDDEN], found[dispatcher, width]
        tokens = sum(plain[:2])
        assert plain[2] - latent[2] == tokens - tokens // alpha


def test_the_bytes_of_an_all_to_all_are_those_of_its_formula():
    """Rows that leave the rank times the latent's width: one for each choice of an expert elsewhere."""
    for rank, found in enumerate(on_ranks()):
        leaving = (choices_of(rank) // 2 != rank).sum().item()
        for width in WIDTHS:
            assert found["all_to_all", width][0] == leaving * width * 4
