"""Queries meet the keys of other ranks as if all were here."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from moefold.config.run import ParallelConfig
from moefold.kernels.attention import attention
from moefold.kernels.bind import bind
from moefold.kernels.catalog import CATALOG, Facts
from moefold.layout.axes import World, alone, name_axes
from moefold.model.attention.context import MECHANISMS, choose_context, pairs
from tests.support.models import share
from tests.support.ranks import run_ranks

FACTS = Facts("cpu", "fp64")
BINDINGS = {"chosen": bind(FACTS), "reference": bind(FACTS, [f"{op}=reference" for op in CATALOG])}
SEQUENCES, LENGTH, WIDTH = 2, 32, 6
HEADS = {"grouped": (8, 4), "full": (4, 4)}  # query heads, key and value heads
NODE_SIZES = {2: (1, 2), 4: (1, 2, 4)}
NAMES = ("result", "gradient of q", "gradient of k", "gradient of v")


def inputs(heads: int, kv_heads: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    sizes = (heads, kv_heads, kv_heads, heads)
    *qkv, dy = (torch.randn(SEQUENCES, LENGTH, n, WIDTH, generator=generator, dtype=torch.float64) * 1.5 for n in sizes)
    return qkv, dy


def errors(world: World) -> dict[tuple[str, str, str, int], dict[str, float]]:
    """How far this rank is from its positions of whole attention, for every mechanism."""
    found = {}
    for node_size in NODE_SIZES[world.size]:
        here = name_axes(world.rank, world.size, world.device, ParallelConfig(cp=world.size), node_size)
        mine = share(SEQUENCES, LENGTH, here)
        for kind, heads in HEADS.items():
            qkv, dy = inputs(*heads)
            whole_inputs = [x.clone().requires_grad_() for x in qkv]
            y = attention.reference(*whole_inputs)
            expected = (y.detach(), *torch.autograd.grad(y, whole_inputs, dy))
            for mechanism in MECHANISMS:
                for binding, kernels in BINDINGS.items():
                    parts = [x[:, mine.positions].requires_grad_() for x in qkv]
                    y = choose_context(mechanism, kernels, here)(*parts, mine)
                    values = (y.detach(), *torch.autograd.grad(y, parts, dy[:, mine.positions]))
                    off = [(a - b[:, mine.positions]).abs().max().item() for a, b in zip(values, expected, strict=True)]
                    found[mechanism, binding, kind, node_size] = dict(zip(NAMES, off, strict=True))
    return found


@cache
def on_ranks(size: int):
    return run_ranks(errors, size)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("size", NODE_SIZES)
def test_a_mechanism_equals_whole_attention_forward_and_backward(size: int, mechanism: str):
    seen = 0
    for rank, found in enumerate(on_ranks(size)):
        for case, off in found.items():
            if case[0] == mechanism:
                seen += 1
                for name, error in off.items():
                    assert error <= 1e-12, f"rank {rank}, {case}: {name} is off by {error:.1e}"
    assert seen == size * len(BINDINGS) * len(HEADS) * len(NODE_SIZES[size])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_alone_nothing_is_met_and_the_kernel_is_called(mechanism: str):
    (q, k, v), _ = inputs(8, 4)
    found = choose_context(mechanism, BINDINGS["reference"], alone())(q, k, v, share(SEQUENCES, LENGTH))
    assert torch.equal(found, attention.reference(q, k, v))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pairs_of_chunks_are_those_a_causal_mask_leaves_and_every_rank_has_as_many(ranks: int):
    chunks = [(r, 2 * ranks - 1 - r) for r in range(ranks)]
    every, work = set(), []
    for mine in range(ranks):
        hops = [(theirs, pair) for theirs in range(ranks) for pair in pairs(mine, theirs, ranks)]
        for theirs, (i, j, causal) in hops:
            query, key = chunks[mine][i], chunks[theirs][j]
            assert causal == (query == key)
            every.add((query, key))
        work.append(sum(1.0 - 0.5 * causal for _, (_, _, causal) in hops))
        assert {len(pairs(mine, theirs, ranks)) for theirs in range(ranks) if theirs != mine} <= {2}
    assert every == {(a, b) for a in range(2 * ranks) for b in range(a + 1)}
    assert len(set(work)) == 1
