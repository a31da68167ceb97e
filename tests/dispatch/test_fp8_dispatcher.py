"""FP8 dispatch: every dispatcher gives what the local one gives for tokens and gradients that were quantised before, in
about half of the bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.errors import UserError
from moefold.config.run import (
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from moefold.dispatch.base import Dispatcher, Receipt, Routing, RowPolicy
from moefold.dispatch.build import DispatchSetting, build_dispatcher, with_fp8_payloads
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.fp8_dispatcher import Fp8Dispatcher, unquantised
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.quantise.fp8 import E4M3, E5M2, Fp8Format, ScaleRule
from moefold.kernels.quantise.fp8_payload import dequantised_rows, quantise_row_blocks
from moefold.layout.axes import World, create_world, single_rank_world
from tests.dispatch.test_dispatchers import DISPATCHERS, liked, numbers, through
from tests.support.ranks import run_ranks

EXPERTS, WIDTH, INNER, TOKENS, K = 8, 128, 16, 32, 3
FP64 = BoundKernels(Facts("cpu", "fp64", hidden=WIDTH, ffn=INNER))
BF16 = BoundKernels(Facts("cpu", "bf16", hidden=WIDTH, ffn=INNER))
MOST_BYTES = 0.53  # of bf16's
WORLDS = [(4, {"ep": 4}), (4, {"ep": 2, "etp": 2}), (8, {"ep": 8}), (8, {"ep": 4, "etp": 2})]
REMOTE = [*(name for name in DISPATCHERS if name != "local"), "symmetric"]


def choose(name: str, kernels: BoundKernels, world: World, gradient: str = "e5m2", **precision: Any) -> Dispatcher:
    model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=EXPERTS, ffn=INNER, top_k=K))
    parallel = ParallelConfig(ep=world.ep.size, etp=world.etp.size, dispatcher=name)
    train = TrainConfig(precision="fp64", micro_batch=1)
    formats = PrecisionConfig(dispatch="fp8", combine_gradient=gradient, **precision)  # pyright: ignore[reportArgumentType]
    config = Config(model=model, parallel=parallel, train=train, data=DataConfig(seq_len=TOKENS), precision=formats)
    return build_dispatcher(config, kernels, world)


def rounded(x: torch.Tensor, format: Fp8Format) -> torch.Tensor:
    return dequantised_rows(quantise_row_blocks(x, ScaleRule(format)), x.dtype)


Found = dict[str, tuple[list[float], dict[str, float]]]


def compare(world: World) -> Found:
    """By dispatcher: the distance of each result from the local dispatcher on the tokens of all ranks, and the bytes of
    each way as a share of bf16's."""
    parallel = ParallelConfig(ep=world.ep.size, etp=world.etp.size)
    two_nodes, one_node = (
        create_world(world.rank, world.size, world.device, parallel, node_size) for node_size in (2, world.size)
    )
    ranks = range(world.size)
    up, down = numbers(EXPERTS, INNER, WIDTH, seed=1), numbers(EXPERTS, WIDTH, INNER, seed=2)
    ids = [liked(rank, K, tokens=TOKENS) for rank in ranks]
    held = [(numbers(TOKENS, WIDTH, seed=10 + r), numbers(TOKENS, K, seed=20 + r)) for r in ranks]
    directions = [numbers(TOKENS, WIDTH, seed=30 + r) for r in ranks]
    # The reference: tokens and the gradient of the result are rounded, and nothing else.
    tokens = rounded(torch.cat([h for h, _ in held]), E4M3)
    leaves = [x.clone().requires_grad_() for x in (tokens, torch.cat([g for _, g in held]), up, down)]
    local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), FP64)
    gradient = rounded(torch.cat(directions), E5M2)
    y, dh, dg, d_up, d_down = through(local, FP64, torch.cat(ids), leaves, gradient)
    mine = slice(world.rank * TOKENS, (world.rank + 1) * TOKENS)
    ep, etp = one_node.ep, one_node.etp
    experts = slice(ep.index * EXPERTS // ep.size, (ep.index + 1) * EXPERTS // ep.size)
    inner = slice(etp.index * INNER // etp.size, (etp.index + 1) * INNER // etp.size)
    expected = (y[mine], dh[mine], dg[mine], d_up[experts, inner], d_down[experts, :, inner])
    found: Found = {}
    for name in REMOTE:
        here = one_node if name == "symmetric" else two_nodes
        own = [*held[world.rank], up[experts, inner], down[experts, :, inner]]
        own = [x.clone().requires_grad_() for x in own]
        values = through(choose(name, FP64, here), FP64, ids[world.rank], own, directions[world.rank])
        off = [((a - b).norm() / b.norm()).item() for a, b in zip(values, expected, strict=True)]
        found[name] = off, shares_of_bytes(name, here, ids[world.rank])
    return found


def shares_of_bytes(name: str, world: World, ids_TK: torch.Tensor) -> dict[str, float]:
    quantised = choose(name, BF16, world)
    mine = bytes_by_way(quantised, ids_TK)
    plain = bytes_by_way(unquantised(quantised), ids_TK)
    return {way: mine[way] / plain[way] for way in plain}


def bytes_by_way(dispatcher: Dispatcher, ids_TK: torch.Tensor) -> dict[str, int]:
    """Bytes of one dispatch and one combine, forward and backward, with bf16 tokens."""
    h = numbers(TOKENS, WIDTH, seed=1).bfloat16().requires_grad_()
    receipt = dispatcher.plan(Routing(torch.ones(TOKENS, K), ids_TK))
    sent: dict[str, int] = {}
    with counted_bytes_sent() as counter:
        rows = dispatcher.dispatch(h, receipt)
        sent["dispatch"] = counter.total()
        rows.source_ND.backward(torch.ones_like(rows.source_ND))
        sent["dispatch, backward"] = counter.total() - sum(sent.values())
        results = torch.ones(len(receipt.order.index_R), WIDTH, dtype=torch.bfloat16, requires_grad=True)
        y = dispatcher.combine(results, receipt)
        sent["combine"] = counter.total() - sum(sent.values())
        y.backward(torch.ones_like(y))
        sent["combine, backward"] = counter.total() - sum(sent.values())
    return sent


@cache
def on_ranks(case: int) -> list[Found]:
    size, layout = WORLDS[case]
    return run_ranks(compare, size, **layout)


@pytest.mark.parametrize("case", range(len(WORLDS)), ids=[str(layout) for _, layout in WORLDS])
@pytest.mark.parametrize("name", REMOTE)
def test_a_dispatcher_in_fp8_equals_the_reference_in_half_of_the_bytes(name: str, case: int):
    for found in on_ranks(case):
        off, shares = found[name]
        assert max(off) < 1e-12
        assert shares["dispatch"] <= MOST_BYTES
        assert shares["combine, backward"] <= MOST_BYTES
        assert shares["dispatch, backward"] == shares["combine"] == 1, "these are sent in the model's dtype"


class OfAnotherPackage:
    def plan(self, routing: Any) -> Any: ...

    def dispatch(self, h_TD: Any, receipt: Any) -> Any: ...

    def combine(self, y_RD: Any, receipt: Any) -> Any: ...


def test_only_what_is_sent_in_fp8_is_wrapped_and_a_dispatcher_that_cannot_send_payloads_is_refused():
    other = OfAnotherPackage()
    policy = RowPolicy(contiguous_placement(EXPERTS))
    setting = DispatchSetting(single_rank_world(), BF16, policy, WIDTH, torch.bfloat16)
    assert with_fp8_payloads(other, "other", setting, PrecisionConfig()) is other
    local = LocalDispatcher(policy, BF16)
    assert with_fp8_payloads(local, "local", setting, PrecisionConfig(dispatch="fp8")) is local
    assert unquantised(local) is local
    with pytest.raises(UserError, match="has no methods send and give_back"):
        with_fp8_payloads(other, "other", setting, PrecisionConfig(combine_gradient="e4m3"))


def test_bytes_of_tokens_and_results_are_counted_in_their_formats():
    order = None
    receipt = Receipt(order, rows_moved=10)  # pyright: ignore[reportArgumentType]
    assert receipt.bytes_moved(256) == 2560
    assert receipt._replace(token_bytes=132).bytes_moved(256) == 5 * 256 + 5 * 132


def test_a_direction_without_a_rule_is_left_to_the_dispatcher():
    calls: list[str] = []

    class Noting(OfAnotherPackage):
        def dispatch(self, h_TD: Any, receipt: Any) -> Any:
            calls.append("dispatch")

        def combine(self, y_RD: Any, receipt: Any) -> Any:
            calls.append("combine")

    dispatcher = Fp8Dispatcher(Noting(), BF16, WIDTH, None, None)  # pyright: ignore[reportArgumentType]
    dispatcher.dispatch(torch.ones(1), None)  # pyright: ignore[reportArgumentType]
    dispatcher.combine(torch.ones(1), None)  # pyright: ignore[reportArgumentType]
    assert calls == ["dispatch", "combine"]
