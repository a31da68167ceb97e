"""Runs that stash the rows of experts are equal, to the bit, to runs that keep them; the pool has the rows that there
are, and no more; rows that find no room change nothing, and their step is run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.config.run import Config
from moefold.config.stash_pages import PAGE_BYTES
from moefold.dispatch.base import Receipt, Routing, RowPolicy, Rows
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.kernels.experts.page_grid import HEAD, MOST, OVERFLOWED
from moefold.kernels.experts.row_stash import pop_rows, push_rows
from moefold.kernels.routing.expert_rows import sum_rows
from moefold.layout.axes import single_rank_world
from moefold.memory.stash import RowStash, StashedCall, StashedRows, stash_of
from moefold.model.moe.layer import MoeSublayer
from moefold.model.moe.router import expert_loads
from moefold.plan.memory.peak_memory import plan_memory
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import RankTrace, random_corpus, trace_one_step, trace_run
from moefold.train.step import take_next_step
from tests.memory.test_graphs import as_graph, figures, same_state
from tests.memory.test_recompute import SIZES, configured, differing, kept_trace

STEPS = 2
PLENTY = 1000  # pages
ROOM = 36  # pages of the bound: 256 rows, three tensors of one cell, three layers


def stashing(config: Config, order: str, pages: int, recompute: str = "") -> Config:
    regions = tuple(filter(None, recompute.split(",")))
    memory = replace(config.memory, stash=order, stash_gib=pages * PAGE_BYTES / 2**30, recompute=regions)
    return replace(config, memory=memory)


def stash_in(run: Run) -> RowStash:
    stash = stash_of(run.model)
    assert stash is not None
    return stash


CASES = [
    ("bf16", "stack", "norm,activation@1,dispatch@1,experts@2"),
    ("tokens ahead", "stack", ""),
    ("capacity", "pages", ""),
    ("latent experts", "stack", "moe@1"),
    ("biases", "pages", ""),
]


@pytest.mark.parametrize(("mechanism", "order", "recompute"), CASES)
def test_a_stashing_run_is_equal_to_the_bit(mechanism: str, order: str, recompute: str):
    config = stashing(configured(mechanism), order, PLENTY, recompute)
    assert differing(trace_run(config, single_rank_world(), STEPS), kept_trace(mechanism)) == []


@pytest.mark.parametrize("mechanism", ["plain", "latent experts", "biases"])
def test_the_planner_has_the_pages_that_a_step_takes(mechanism: str):
    config = stashing(configured(mechanism), "stack", PLENTY, "activation@2")
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    take_next_step(run)
    [planned] = plan_memory(config, 1, PlanChoices(precision="fp32", device="cpu"))
    pool = stash_in(run).pool
    assert pool is not None
    assert int(pool.state[MOST]) * PAGE_BYTES == planned.stashed > 0


# ---- bounded rows


class PlayedRank:
    """One of two ranks of experts, played on one: choices of the other's experts have no row here. R is the bound that
    a host knows, all choices; how many there are, the device knows."""

    def __init__(self, experts: int, rank: int):
        self.policy = RowPolicy(contiguous_placement(experts, 1), drops=True)
        self.held = experts // 2
        self.rank = rank

    def plan(self, routing: Routing) -> Receipt:
        ids_TK = routing.ids_TK
        here = ids_TK // self.held == self.rank
        own = routing._replace(ids_TK=ids_TK.where(here, -1))
        return Receipt(self.policy.order_by_expert(own, len(ids_TK), most_choices=ids_TK.numel()))

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        return Rows(h_TD, receipt.order)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        order = receipt.order
        return sum_rows(y_RD, order.index_R, order.slots_NK, order.holes)


def played_run(config: Config, ranks: tuple[int, ...]) -> Run:
    """A run whose MoE layers play these ranks, in turn."""
    world = single_rank_world(config.train.device)
    run = assemble_run(config, world, Path("."), random_corpus(config))
    layers = [module for module in run.model.modules() if isinstance(module, MoeSublayer)]
    for number, layer in enumerate(layers):
        layer.dispatcher = PlayedRank(config.model.moe.experts, ranks[number % len(ranks)])
    return run


JUDGED = "--observe.spike 3 --optim.clip_by previous --model.moe.balance.aux_over previous_batch"


def bounded_config(words: str = "") -> Config:
    """256 rows at most."""
    sizes = ["--model.moe.dense_layers", "0", "--data.seq_len", "128", "--optim.lr", "1e-2", *words.split()]
    return resolve_recipe("tiny", [*SIZES, *sizes], 1)


def test_the_pool_has_the_rows_of_every_played_rank_and_tensors_of_the_bound_are_freed():
    config = bounded_config()
    run = played_run(stashing(config, "stack", PLENTY), (0, 1))
    stash = stash_in(run)
    memories: list[StorageWeakRef] = []
    pages: list[int] = []

    class WatchedStash(RowStash):
        def stash_storage(self, call: StashedCall, x: Tensor) -> StashedRows:
            memories.append(StorageWeakRef(x.untyped_storage()))
            rows = super().stash_storage(call, x)
            blocks = -(-int(call.ends_e[-1]) // 64)
            cells = -(-x[0].numel() * x.element_size() // 256)
            pages.append(blocks * cells)
            return rows

    stash.__class__ = WatchedStash
    batch = run.loader.next_batch()
    model = run.model
    carry = model.begin(batch.tokens_BS[:1], batch.labels_BS[:1])
    for step in model.steps(model.stages[0]):
        carry = step.run(carry)
    assert len(memories) == 9
    assert all(memory.expired() for memory in memories)
    assert stash.pool is not None
    assert stash.pool.state.tolist() == [sum(pages), PLENTY, sum(pages), 0]
    assert 0 < sum(pages) < ROOM, "what the bound would take"
    carry["losses_1M"].sum().backward()
    assert stash.pool.state[HEAD] == 0
    assert not stash.pool.stack


@pytest.mark.parametrize("order", ["stack", "pages"])
def test_skewed_routing_overflows_and_the_step_is_run_again_with_the_same_bits(order: str):
    """The first step fits, all choices of the second are experts of the played rank, and the third fits again."""
    config = bounded_config(JUDGED)
    kept = played_run(config, (0,))
    bounded = played_run(stashing(config, order, ROOM - 6), (0,))
    repeated: list[int] = []
    for push in (0.0, 9.0, -9.0):
        traces: list[RankTrace] = []
        for run in (kept, bounded):
            for load in expert_loads(run.model):
                load.bias_E[:2] += push
            traces.append(trace_one_step(run))
        assert differing(*traces) == []
        repeated.append(bounded.row_guard.repeated_steps)
    assert repeated == [0, 1, 1]
    for name, provider in kept.further_state.items():
        others = dict(bounded.further_state[name].named_state())
        for what, x in provider.named_state():
            assert torch.equal(x, others[what]), what
    assert same_state(kept, bounded)


def test_a_step_that_overflows_changes_nothing_and_writes_no_page_beyond_the_pool():
    """Pages of the pool are views of a larger one, whose other pages stay as they are."""
    config = stashing(bounded_config(JUDGED), "pages", 6)
    run = played_run(config, (0, 1))
    stash = stash_in(run)
    stash.begin_step()
    pool = stash.pool
    assert pool is not None
    around = torch.full((10, PAGE_BYTES), 7, dtype=torch.uint8)
    pool.memory = around[2:8]
    before = [x.clone() for x in run.model.state_dict().values()]
    judged = [x.clone() for x in run.row_guard.judged]  # pyright: ignore[reportAttributeAccessIssue]
    flags: list[bool] = []

    class Stopped(Exception): ...

    def stop() -> None:
        assert run.row_guard.overflowed is not None
        flags.append(bool(run.row_guard.overflowed))
        raise Stopped

    run.row_guard.lifted = stop  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Stopped):
        take_next_step(run)
    assert flags == [True]
    assert pool.state[OVERFLOWED] == 1
    assert (around[:2] == 7).all()
    assert (around[8:] == 7).all()
    assert not (pool.memory == 7).all()
    assert all(torch.equal(x, y) for x, y in zip(before, run.model.state_dict().values(), strict=True))
    now = run.row_guard.judged  # pyright: ignore[reportAttributeAccessIssue]
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(judged, now, strict=True))


def test_replays_of_a_graph_overflow_and_go_on():
    config = bounded_config("--train.global_batch 1 --model.layers 2")
    kept = played_run(config, (0,))
    graphed = played_run(stashing(config, "stack", 20), (0,))
    recorder = as_graph(graphed, warm_up=1)
    for push in (0.0, 0.0, 0.0, 9.0, -9.0):
        for run in (kept, graphed):
            for load in expert_loads(run.model):
                load.bias_E[:2] += push
        assert figures(take_next_step(kept)) == figures(take_next_step(graphed))
    assert recorder.recordings == 1
    assert graphed.row_guard.repeated_steps == 1
    assert same_state(kept, graphed)


def test_a_second_backward_and_rows_of_an_earlier_step_are_refused():
    stash = RowStash(40 * PAGE_BYTES, True, torch.device("cpu"), push_rows, pop_rows)
    order = RowPolicy(contiguous_placement(2, 1)).order_by_expert(
        Routing(torch.ones(100, 2), torch.arange(200).view(100, 2) % 2), 100
    )
    x = torch.randn(200, 64)
    call = StashedCall(Rows(torch.randn(100, 64), order))
    stash.begin_step()
    view = stash.pack(None, call, x)  # pyright: ignore[reportArgumentType]
    assert torch.equal(view.tensor(), x)
    with pytest.raises(RuntimeError, match="a second backward through stashed rows"):
        view.tensor()
    half = stash.pack(None, call, x[:, :32])  # pyright: ignore[reportArgumentType]
    whole = stash.pack(None, call, x)  # pyright: ignore[reportArgumentType]
    assert stash.stashed_tensors == 2, "views of one storage are stashed once"
    assert torch.equal(half.tensor(), x[:, :32])
    assert torch.equal(whole.tensor(), x)
    late = stash.pack(None, call, x.clone())  # pyright: ignore[reportArgumentType]
    stash.begin_step()
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        late.tensor()


# ---- an order that is no stack

ORDER = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]  # of microbatches in the first of two stages


def gradients_in_order(run: Run) -> list[Tensor]:
    model = run.model
    batch = run.loader.next_batch()
    losses: dict[str, Tensor] = {}
    for slot in ORDER:
        number = slot[1:]
        if slot.startswith("F"):
            first = int(number)
            tokens, labels = batch.tokens_BS[first : first + 1], batch.labels_BS[first : first + 1]
            carry = model.begin(tokens, labels)
            for step in model.steps(model.stages[0]):
                carry = step.run(carry)
            losses[number] = carry["losses_1M"].sum()
        else:
            losses.pop(number).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("order", ["stack", "pages"])
def test_pages_serve_an_order_that_is_no_stack_with_room_for_two_microbatches(order: str):
    """Rows of a microbatch are one block here. A stack has to wait until what lies above is freed."""
    config = resolve_recipe("tiny", [*SIZES, "--train.global_batch", "4", "--model.moe.dense_layers", "0"], 1)
    kept = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    stashing_run = assemble_run(
        stashing(config, order, PLENTY), single_rank_world(), Path("."), random_corpus(config)
    )  # fmt: skip
    pairs = zip(gradients_in_order(kept), gradients_in_order(stashing_run), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    pool = stash_in(stashing_run).pool
    assert pool is not None
    head, tail, most, overflowed = pool.state.tolist()
    of_microbatch = 3 * 3
    assert overflowed == 0
    assert most == of_microbatch * (4 if order == "stack" else 2)
    assert (head, tail) == ((0, PLENTY) if order == "stack" else (4 * of_microbatch, PLENTY + 4 * of_microbatch))
    assert not pool.stack
