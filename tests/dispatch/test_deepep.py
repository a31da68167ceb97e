"""The hop that DeepEP carries, with a stand-in for the package that keeps its documented interface over gloo."""

from __future__ import annotations

import pytest
import torch

from moefold.config.errors import UserError
from moefold.dispatch.base import Hop, RowPolicy
from moefold.dispatch.deepep import DeepEpHop, make_deepep_buffer, require_deepep
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.hop import AllToAllHop, pack_for_everyone
from moefold.dispatch.hop_dispatcher import HopDispatcher
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.traffic import TrafficCounter, tokens_for_everyone
from moefold.layout.axes import World
from tests.dispatch.test_dispatchers import BINDINGS, EXPERTS, INNER, ROUTINGS, VALUES, WIDTH, WORLD, numbers, through
from tests.support import deep_ep_over_gloo
from tests.support.ranks import run_ranks

KERNELS = BINDINGS["chosen"]


def distances(world: World) -> dict[tuple[str, str], float]:
    """How far each value is from that of the local dispatcher with the tokens of all ranks."""
    ep, etp = world.axis("ep"), world.axis("etp")
    held = EXPERTS // ep.size
    placement = contiguous_placement(EXPERTS, ep.size)
    hops: list[Hop] = [DeepEpHop(make_deepep_buffer(deep_ep_over_gloo, ep, WIDTH * 8), ep, placement)]
    if etp.size > 1:
        hops.append(AllToAllHop(etp, pack_for_everyone, placement.rank_of, tokens_for_everyone, KERNELS))
    traffic = TrafficCounter(placement, world) if etp.size > 1 else None
    there = HopDispatcher(hops, RowPolicy(placement, ep.index), KERNELS, traffic)
    up, down = numbers(EXPERTS, INNER, WIDTH, seed=1), numbers(EXPERTS, WIDTH, INNER, seed=2)
    experts = slice(ep.index * held, (ep.index + 1) * held)
    inner = slice(etp.index * INNER // etp.size, (etp.index + 1) * INNER // etp.size)
    found = {}
    for routing, choices in ROUTINGS.items():
        ids = [choices(rank) for rank in range(WORLD)]
        tokens, k = ids[0].shape
        h = [numbers(tokens, WIDTH, seed=10 + r) for r in range(WORLD)]
        gates = [numbers(tokens, k, seed=20 + r).float().double() for r in range(WORLD)]  # they travel as fp32
        ways = [numbers(tokens, WIDTH, seed=30 + r) for r in range(WORLD)]
        whole = [x.clone().requires_grad_() for x in (torch.cat(h), torch.cat(gates), up, down)]
        local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), KERNELS)
        y, dh, dg, d_up, d_down = through(local, KERNELS, torch.cat(ids), whole, torch.cat(ways))
        mine = slice(world.rank * tokens, (world.rank + 1) * tokens)
        expected = (y[mine], dh[mine], dg[mine], d_up[experts, inner], d_down[experts, :, inner])
        leaves = (h[world.rank], gates[world.rank], up[experts, inner], down[experts, :, inner])
        leaves = [x.clone().requires_grad_() for x in leaves]
        values = through(there, KERNELS, ids[world.rank], leaves, ways[world.rank])
        for what, a, b in zip(VALUES, values, expected, strict=True):
            assert a.shape == b.shape
            found[routing, what] = (a - b).abs().max().item() if a.numel() else 0.0
    return found


@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
def test_the_hop_equals_the_local_dispatcher_forward_and_backward(layout: dict[str, int]):
    for rank, found in enumerate(run_ranks(distances, WORLD, **layout)):
        for (routing, what), off in found.items():
            most = 1e-5 if what == "gradient of gates" else 1e-12  # gates and their gradients travel as fp32
            assert off <= most, f"rank {rank}, {routing}: {what} off by {off}"


@pytest.mark.parametrize(
    ("device", "dtype", "hidden", "says"),
    [
        ("cpu", torch.bfloat16, 512, "needs CUDA devices, but this run is on cpu"),
        ("cuda", torch.float32, 512, "this run has float32 rows of 512"),
        ("cuda", torch.bfloat16, 500, "this run has bfloat16 rows of 500"),
        ("cuda", torch.bfloat16, 1024, "deep_ep cannot be imported"),
    ],
)
def test_what_deepep_needs_and_does_not_find_is_said(device: str, dtype: torch.dtype, hidden: int, says: str):
    with pytest.raises(UserError) as refused:
        require_deepep(device, dtype, hidden)
    assert says in str(refused.value)
    assert "set parallel.dispatcher to auto" in str(refused.value)
