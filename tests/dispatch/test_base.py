"""Rows: padding, an upper bound of R that needs no wait for the device, and the bytes that a receipt reports."""

from __future__ import annotations

import pytest
import torch

from moefold.comm import byte_counters
from moefold.config.run import Config, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.base import Receipt, Routing, RowOrder, RowPolicy
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.layout.axes import World, create_world
from tests.dispatch.test_dispatchers import BINDINGS, DISPATCHERS, EXPERTS, INNER, ROUTINGS, WIDTH, WORLD, numbers
from tests.support.ranks import run_ranks

KERNELS = BINDINGS["chosen"]
PLACEMENT = contiguous_placement(EXPERTS, 2)


def experts_by_loop(h_ND: torch.Tensor, matrix_eDD: torch.Tensor, order: RowOrder, undefined: float) -> torch.Tensor:
    """Each expert's rows times its matrix; rows behind the last end get a value that must not matter."""
    x_RD = KERNELS[gather_rows](h_ND, order.index_R, order.slots_NK, order.holes)
    parts, begin = [], 0
    for expert, end in enumerate(order.ends_e.tolist()):
        parts.append(x_RD[begin:end] @ matrix_eDD[expert] * order.weight_R[begin:end, None])
        begin = end
    return torch.cat((*parts, torch.full_like(x_RD[begin:], undefined)))


@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_with_a_bound_rows_and_results_are_those_of_the_exact_number(routing: str, multiple: int):
    ids_TK = ROUTINGS[routing](0)
    ids_TK = torch.where(ids_TK == 1, -1, ids_TK)  # dropped
    tokens, k = ids_TK.shape
    results = []
    policy = RowPolicy(PLACEMENT, drops=True, multiple=multiple)
    for most_choices in (None, ids_TK.numel()):
        leaves = [
            numbers(tokens, WIDTH, seed=1),
            numbers(tokens, k, seed=2),
            numbers(PLACEMENT.held, WIDTH, WIDTH, seed=3),
        ]
        h_TD, weights_TK, matrix_eDD = (leaf.requires_grad_() for leaf in leaves)
        dispatcher = LocalDispatcher(policy, KERNELS)
        order = policy.order_by_expert(Routing(weights_TK, ids_TK), tokens, most_choices=most_choices)
        receipt = Receipt(order)
        y_RD = experts_by_loop(h_TD, matrix_eDD, receipt.order, undefined=1e30)
        y_TD = dispatcher.combine(y_RD, receipt)
        direction = numbers(tokens, WIDTH, seed=4)
        gradients = torch.autograd.grad(y_TD, (h_TD, weights_TK, matrix_eDD), direction)
        results.append((receipt.order, (y_TD, *gradients)))
    (exact, values), (wide, bounded_values) = results
    last = int(exact.ends_e[-1])
    assert len(exact.index_R) == last
    assert len(wide.index_R) == tokens * k + PLACEMENT.held * (multiple - 1)
    assert torch.equal(exact.ends_e, wide.ends_e)
    assert torch.equal(exact.slots_NK, wide.slots_NK)
    assert torch.equal(exact.index_R, wide.index_R[:last])
    assert torch.equal(exact.weight_R, wide.weight_R[:last])
    assert (wide.index_R[last:] == -1).all()
    assert (wide.weight_R[last:] == 0).all()
    for a, b in zip(values, bounded_values, strict=True):
        assert torch.equal(a, b)


class WaitedForDevice(Exception): ...


def refuse_to_wait(*_: object) -> None:
    raise WaitedForDevice


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way in which Python reads a value of a tensor raises."""
    for name in ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "nonzero", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse_to_wait)


@pytest.mark.parametrize("may_be_remote", [False, True])
def test_with_a_bound_nothing_waits_for_the_device(no_waiting: None, may_be_remote: bool):
    routing = Routing(numbers(12, 3, seed=2), ROUTINGS["random"](0))
    policy = RowPolicy(PLACEMENT, 1, drops=True, multiple=8)
    policy.order_by_expert(routing, 12, may_be_remote, most_choices=36)
    with pytest.raises(WaitedForDevice):
        policy.order_by_expert(routing, 12, may_be_remote)


def test_padding_to_a_fixed_number_of_rows_does_not_wait_either(no_waiting: None):
    policy = RowPolicy(PLACEMENT, drops=True, each=lambda tokens: 2 * tokens)
    routing = Routing(numbers(12, 3, seed=2), ROUTINGS["random"](0))
    order = policy.order_by_expert(routing, 12)
    assert len(order.index_R) == 24 * PLACEMENT.held


def counted_and_reported(world: World) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes that counters see in dispatch and combine, and those that the receipt reports."""
    here = create_world(world.rank, WORLD, world.device, ParallelConfig(ep=2, etp=2), node_size=2)
    model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=EXPERTS, ffn=INNER))
    found = {}
    for routing, choices in ROUTINGS.items():
        ids_TK = choices(world.rank)
        tokens, k = ids_TK.shape
        for name in DISPATCHERS:
            parallel = ParallelConfig(ep=2, etp=2, dispatcher=name)
            config = Config(model=model, parallel=parallel, train=TrainConfig(precision="fp64"))
            dispatcher = build_dispatcher(config, KERNELS, here)
            receipt = dispatcher.plan(Routing(numbers(tokens, k, seed=1), ids_TK))
            h_TD = numbers(tokens, WIDTH, seed=2)
            with byte_counters.counted_bytes_sent() as sent:
                rows = dispatcher.dispatch(h_TD, receipt)
                dispatcher.combine(rows.source_ND[rows.order.index_R], receipt)
            reported = receipt.rows_moved * WIDTH * h_TD.element_size()
            found[name, routing] = (sum(sent.values()), reported)
    return found


def test_a_receipt_reports_the_bytes_that_counters_see():
    total = 0
    for rank, found in enumerate(run_ranks(counted_and_reported, WORLD)):
        for case, (counted, reported) in found.items():
            assert counted == reported, f"rank {rank}, {case}"
            total += counted
    assert total > 0
