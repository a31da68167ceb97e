"""Expert load is evened out the same way however a batch is split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.run import (
    AttentionConfig,
    BalanceConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.routing.router_ops import count_choices, router_topk
from moefold.kernels.routing.router_spec import RouterSpec
from moefold.layout.axes import Axis, World, create_world, single_rank_world
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.balance import (
    remember_global_shares,
    sum_loads_over_ranks,
    update_selection_biases,
)
from moefold.model.moe.router import ExpertLoad, Router, balance_losses
from moefold.model.steps import Step, run_step_sequence
from moefold.train.assemble import Run, assemble_run, default_dtype
from moefold.train.parity import TraceEntry, first_mismatch, random_corpus, trace_one_step
from tests.model.test_router import logits_by_loop, scores_by_loop
from tests.support.models import share, transformer, with_moe_keys
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=32,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, balance=BalanceConfig(bias_rate=0.01, aux_loss=0.25)),
)
ALONE = Axis("world")
OVER = ["sequence", "microbatch", "global_batch", "previous_batch"]


def make_router(dtype: torch.dtype = torch.float32, hidden: int = 16, **moe: Any) -> Router:
    model = replace(MODEL, hidden=hidden, init_std=0.5, moe=with_moe_keys(MODEL.moe, **moe))
    with default_dtype(dtype):
        router = Router(model, 0, BoundKernels(Facts("cpu", "fp32")), single_rank_world())
    initialise_parameters(router, seed=1)
    return router


def cycling(tokens: int, experts: int = 4, k: int = 2) -> torch.Tensor:
    return (torch.arange(tokens * k) % experts).view(tokens, k)


def loss(logits_TE: torch.Tensor, ids_TK: torch.Tensor, sequences: int, **moe: Any) -> torch.Tensor:
    """Of softmax scores, with the load of a batch that is these tokens."""
    experts, k = logits_TE.shape[1], ids_TK.shape[1]
    load, where = ExpertLoad(experts), share(sequences, len(logits_TE) // sequences)
    _, _, counts_BE, *sums = router_topk(logits_TE, torch.zeros(experts), RouterSpec(k), ids_TK, where.span)
    load.count(counts_BE, ids_TK, ids_TK)
    remember_global_shares([load], ALONE)
    how = with_moe_keys(MoeConfig(), **{"experts": experts, "top_k": k, **moe})
    return balance_losses(counts_BE, sums[0], sums[1], how, load, torch.nn.Identity(), where)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_perfect_balance_costs_exactly_the_coefficient_per_token(sequences: int, over: str):
    even, ids = torch.zeros(32, 4), cycling(32)
    assert loss(even, ids, sequences, aux_loss=0.25, aux_over=over).item() / 32 == 0.25
    assert loss(even, ids, sequences, device_loss=0.5, devices=2, aux_over=over).item() / 32 == 0.5
    sure = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5
    assert loss(sure, ids, sequences, aux_loss=0.25, aux_over=over).item() / 32 == pytest.approx(0.25, rel=1e-14)


@pytest.mark.parametrize("over", OVER)
def test_imbalance_costs_more_and_a_coefficient_of_zero_costs_nothing(over: str):
    logits = torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log().expand(8, 4)
    ids = torch.tensor([[0, 1]]).expand(8, 2)
    one = 4 * (0.5 * 0.7 + 0.5 * 0.1)
    assert loss(logits, ids, 2, aux_loss=1.0, aux_over=over).item() / 8 == pytest.approx(one, rel=1e-14)
    apart = torch.tensor([[0, 0]]).expand(8, 2)  # for groups of two the same as one choice of each
    device = loss(logits, apart, 2, device_loss=1.0, devices=2, aux_over=over)
    assert device.item() / 8 == pytest.approx(one, rel=1e-14)
    assert loss(logits, ids, 2, aux_loss=0.0, aux_over=over) == 0


def test_the_device_loss_cares_for_groups_and_not_for_experts_within_them():
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    within = torch.tensor([[0, 2]]).expand(8, 2)  # one expert of each group, always the same
    assert loss(logits, within, 2, device_loss=1.0, devices=2).item() / 8 == pytest.approx(1.0, rel=1e-14)
    assert loss(logits, within, 2, aux_loss=1.0).item() / 8 != pytest.approx(1.0, rel=1e-3)


def test_the_loss_of_fp64_scores_is_exact_for_shares_that_are_no_power_of_two():
    even, ids = torch.zeros(3, 3, dtype=torch.float64), torch.tensor([[0], [1], [2]])
    assert loss(even, ids, 1, aux_loss=1.0).item() == pytest.approx(3.0, rel=1e-14)


def losses_by_loop(router: Router, h_TD: torch.Tensor, weight: torch.Tensor, ids: list[list[int]], sequences: int):
    """All losses of a router, one token and one expert at a time."""
    moe, length, total = router.moe, len(h_TD) // sequences, torch.zeros((), dtype=torch.float64)
    size = moe.experts // moe.balance.devices
    for t, logits in enumerate(logits_by_loop(h_TD, weight, None)):
        begin = t // length * length
        together = {"sequence": ids[begin : begin + length], "microbatch": ids}.get(moe.balance.aux_over)
        if together is None:
            load = router.load.share_E.tolist()
        else:
            load = [sum(row.count(e) for row in together) / (len(together) * moe.top_k) for e in range(moe.experts)]
        scores = scores_by_loop(logits, moe)
        for e in range(moe.experts):
            device = load[e // size * size : (e // size + 1) * size]
            weighed = moe.balance.aux_loss * load[e] + moe.balance.device_loss * sum(device) / size
            total = total + moe.experts * weighed * scores[e] / sum(scores)
        total = total + moe.balance.z_loss * torch.stack([one.exp() for one in logits]).sum().log() ** 2
    return total


EACH: dict[str, dict[str, Any]] = {
    "balance": {"aux_loss": 0.3},
    "device": {"aux_loss": 0.0, "device_loss": 0.7, "devices": 2},
    "z": {"aux_loss": 0.0, "z_loss": 0.05},
    "all": {"aux_loss": 0.3, "device_loss": 0.7, "devices": 4, "z_loss": 0.05},
}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", EACH)
def test_every_loss_equals_its_formula_written_out_and_its_gradients_pass_gradcheck(kind: str, score: str, over: str):
    router = make_router(torch.float64, hidden=3, score=score, aux_over=over, experts=8, **EACH[kind])
    router.load.share_E.copy_(torch.arange(1.0, 9.0) / 36)  # what a survey left, for those that look at it
    h_TD = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    weight, where = router.weight.detach().requires_grad_(), share(3, 2)

    def mine(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional_call(router, {"weight": w}, (h, where))[1]

    expected = losses_by_loop(router, h_TD, weight, router(h_TD, where)[0].ids_TK.tolist(), 3)
    torch.testing.assert_close(mine(h_TD, weight), expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(mine(h_TD, weight), (h_TD, weight))
    for a, b in zip(found, torch.autograd.grad(expected, (h_TD, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(mine, (h_TD, weight))


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("shift", [0.0, 2.0, 8.0, 20.0])
def test_a_sigmoid_router_cannot_lower_its_loss_by_shrinking_its_scores(shift: float, over: str):
    router = make_router(torch.float64, score="sigmoid", biases=True, aux_loss=1.0, aux_over=over, top_k=1)
    bias, h_TD = router.bias, torch.zeros(16, 16, dtype=torch.float64)
    assert bias is not None
    with torch.no_grad():
        bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]) - shift)
    router(h_TD, share(2, 8))
    remember_global_shares([router.load], ALONE)
    _, aux = router(h_TD, share(2, 8))
    scores = [1 / (1 + math.exp(shift - 1)), 1 / (1 + math.exp(shift))]
    assert aux.item() / 16 == pytest.approx(4 * scores[0] / (scores[0] + 3 * scores[1]), rel=1e-11)
    assert aux.item() / 16 > 1.3, "all tokens go to one expert, and at every shift that costs"
    (uphill,) = torch.autograd.grad(aux, bias)
    assert uphill[0] > 0, "what helps is to score the crowded expert lower"
    assert (uphill[1:] < 0).all(), "and the others higher"
    assert uphill.sum() < 1e-11, "lowering them all does not help"


@pytest.mark.parametrize("parts", [(8,), (4, 4), (1, 7), (1, 2, 5), (1,) * 8])
def test_the_loss_of_a_batch_is_the_sum_over_its_sequences_however_it_is_split(parts: tuple[int, ...]):
    router = make_router(torch.float64)
    h_BSD = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, whole = router(h_BSD.flatten(0, 1), share(8, 6))
    split = sum(router(part.flatten(0, 1), share(len(part), 6))[1] for part in h_BSD.split(parts))
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=0)


def counted(*rows: list[int], experts: int = 4) -> ExpertLoad:
    load = ExpertLoad(experts)
    note(load, torch.tensor(rows))
    return load


def note(load: ExpertLoad, ids_TK: torch.Tensor, kept_TK: torch.Tensor | None = None) -> None:
    counts_TE = count_choices(ids_TK, len(load.counts_E))
    load.count(counts_TE, ids_TK, ids_TK if kept_TK is None else kept_TK)


def test_the_bias_moves_against_the_load_by_one_step_and_counting_starts_anew():
    moe = MoeConfig(balance=BalanceConfig(bias_rate=0.5))
    load = counted([0, 1], [0, 1], [0, 2], [0, 1])
    assert load.counts_E.tolist() == [4, 3, 1, 0]
    assert update_selection_biases([load], moe, ALONE).counts_LE.tolist() == [[4, 3, 1, 0]]
    assert load.bias_E.tolist() == [-0.5, -0.5, 0.5, 0.5]
    assert load.counts_E.tolist() == [0, 0, 0, 0]
    even = torch.tensor([[0], [1], [2], [3]])
    note(load, even)
    update_selection_biases([load], moe, ALONE)
    assert load.bias_E.tolist() == [-0.5, -0.5, 0.5, 0.5], "an even load moves nothing"


def test_a_proportional_bias_moves_by_the_lack_of_load_as_a_share_of_the_mean():
    load = counted([0, 1], [0, 1], [0, 2], [0, 1])
    update_selection_biases([load], MoeConfig(balance=BalanceConfig(bias_rate=0.5, bias_step="proportional")), ALONE)
    assert load.bias_E.tolist() == [0.5 * (2 - count) / 2 for count in (4, 3, 1, 0)]
    update_selection_biases([load], MoeConfig(balance=BalanceConfig(bias_rate=0.5, bias_step="proportional")), ALONE)
    assert load.bias_E.tolist() == [-0.5, -0.25, 0.25, 0.5], "a batch of no tokens moves nothing"


@pytest.mark.parametrize(("pace_of", "moved"), [("constant", 0.5), ("learning_rate", 0.125)])
def test_the_step_of_the_bias_stays_or_falls_with_the_learning_rate(
    pace_of: Literal["constant", "learning_rate"], moved: float
):
    load = counted([0], [0], experts=2)
    update_selection_biases(
        [load], MoeConfig(balance=BalanceConfig(bias_rate=0.5, bias_pace=pace_of)), ALONE, pace=0.25
    )
    assert load.bias_E.tolist() == [-moved, moved]


def test_a_rate_of_zero_leaves_the_bias_and_still_counts_anew():
    load = counted([0], [0], experts=2)
    update_selection_biases([load], MoeConfig(balance=BalanceConfig(bias_rate=0.0)), ALONE)
    assert load.bias_E.tolist() == [0, 0]
    assert load.counts_E.tolist() == [0, 0]


def test_previous_batch_remembers_the_shares_of_a_step_and_other_kinds_do_not():
    lagging, other = counted([0, 1], [0, 1], [0, 2], [0, 1]), counted([0, 1], [0, 1], [0, 2], [0, 1])
    update_selection_biases([lagging], MoeConfig(balance=BalanceConfig(aux_over="previous_batch")), ALONE)
    update_selection_biases([other], MoeConfig(balance=BalanceConfig(aux_over="sequence")), ALONE)
    assert lagging.share_E.tolist() == [0.5, 0.375, 0.125, 0.0]
    assert other.share_E.tolist() == [0.25] * 4


def test_a_survey_remembers_shares_forgets_counts_and_moves_no_bias():
    load = counted([0, 1], [0, 1], [0, 2], [0, 1])
    remember_global_shares([load], ALONE)
    assert load.share_E.tolist() == [0.5, 0.375, 0.125, 0.0]
    assert load.counts_E.sum() == load.dropped == load.moved == 0
    assert load.bias_E.tolist() == [0.0] * 4


def test_loads_tell_layers_choices_dropped_ones_and_bytes_and_no_choice_counts_for_none():
    load = ExpertLoad(3, layer=5)
    note(load, torch.tensor([[0, 1], [0, -1], [2, 0]]), torch.tensor([[0, 1], [-1, -1], [2, -1]]))
    load.note_moved(70)
    load.note_moved(7)
    found = sum_loads_over_ranks([load], ALONE)
    assert found.layers == [5]
    assert found.counts_LE.tolist() == [[3, 1, 1]], "choices made, kept or not"
    assert found.dropped_L.tolist() == [2]
    assert found.moved_L.tolist() == [77]
    load.forget_counts()
    empty = sum_loads_over_ranks([load], ALONE)
    assert empty.counts_LE.sum() == empty.dropped_L.sum() == sum(empty.moved_L) == 0


def test_enough_updates_bring_a_neglected_expert_back():
    router = make_router()
    with torch.no_grad():
        router.weight[3] = -1.0
    h_TD = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).abs()
    assert 3 not in router(h_TD, share(1, len(h_TD)))[0].ids_TK
    for _ in range(100):
        router(h_TD, share(1, len(h_TD)))
        update_selection_biases([router.load], router.moe, ALONE)
    assert 3 in router(h_TD, share(1, len(h_TD)))[0].ids_TK


def test_the_bias_is_fp32_and_part_of_the_state_with_the_shares_and_counts_are_not():
    assert set(ExpertLoad(4).state_dict()) == {"bias_E", "share_E"}
    assert ExpertLoad(4).bias_E.dtype == torch.float32


def test_nothing_is_counted_in_eval_mode():
    router, h_TD = make_router(capacity_factor=0.5), torch.randn(10, 16)
    router.eval()
    router(h_TD, share(1, len(h_TD)))
    assert router.load.counts_E.sum() == router.load.dropped == 0
    router.train()
    router(h_TD, share(1, len(h_TD)))
    assert router.load.counts_E.sum() == 20
    assert router.load.dropped >= 8


def three_steps(world: World) -> tuple[list[list[float]], list[list[int]]]:
    """The selection biases and the last counts after three batches of 8 sequences, split over the ranks."""
    model = transformer(MODEL, 6, BoundKernels(Facts("cpu", "fp32", hidden=16, ffn=16)), world)
    initialise_parameters(model, seed=1)
    counts = torch.empty(0)
    for step in range(3):
        batch = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(step))
        dp = world.axis("dp")
        for part in batch.tensor_split(dp.size)[dp.index].split(3):
            model(part, part)
        counts = model.balance().counts_LE
    biases = [module.bias_E.tolist() for module in model.modules() if isinstance(module, ExpertLoad)]
    return biases, counts.tolist()


def test_biases_and_counts_are_identical_on_one_two_and_four_ranks():
    (alone,) = run_ranks(three_steps, 1)
    assert any(any(row) for row in alone[0]), "the biases moved"
    assert [sum(row) for row in alone[1]] == [8 * 6 * 2] * 2
    assert run_ranks(three_steps, 2) == [alone] * 2
    assert run_ranks(three_steps, 4) == [alone] * 4


def test_a_model_without_a_single_moe_layer_has_nothing_to_balance():
    model = transformer(replace(MODEL, moe=replace(MODEL.moe, dense_layers=2)), 6, BoundKernels(Facts("cpu", "fp32")))
    found = model.balance()
    assert found.layers == found.moved_L.tolist() == []
    assert found.counts_LE.numel() == found.dropped_L.numel() == 0


@dataclass(frozen=True)
class Way:
    """One way to split a batch of 8 sequences; `again`: every block is computed a second time for its gradients."""

    ranks: int
    micro_batch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    again: bool = False

    def config(self, changes: dict[str, Any]) -> Config:
        moe = with_moe_keys(MoeConfig(experts=8, top_k=2, ffn=8, shared_ffn=8), **changes)
        attention = AttentionConfig(heads=4, kv_heads=2, head_dim=4)
        return Config(
            model=ModelConfig(layers=2, hidden=16, init_std=0.3, dense_ffn=8, attention=attention, moe=moe),
            data=DataConfig(seq_len=16),
            train=TrainConfig(global_batch=8, micro_batch=self.micro_batch, precision="fp64", device="cpu"),
            optim=OptimConfig(warmup=0, lr=1e-2, eps=1e-3, max_norm=1e9),
            parallel=ParallelConfig(tp=self.tp, cp=self.cp, ep=self.ep, context="ring"),
        )


WAYS = [
    *(Way(1, micro_batch) for micro_batch in (1, 2, 8)),
    *(Way(2, 1), Way(2, 4, cp=2), Way(2, 2, tp=2)),
    *(Way(4, 2, cp=2), Way(4, 8, cp=2, tp=2), Way(4, 1, tp=2, ep=4)),
    *(Way(8, 1, cp=2, tp=2), Way(8, 4, cp=4, tp=2, ep=8), Way(8, 1, ep=2)),
]
SOME = [WAYS[2], WAYS[3], WAYS[7], WAYS[9], Way(1, 2, again=True), Way(2, 4, cp=2, ep=2, again=True)]
WITHIN = [Way(1, 2), Way(2, 2, cp=2), Way(4, 2, cp=2, tp=2), Way(1, 2, again=True)]  # a microbatch is a microbatch
KINDS: dict[str, dict[str, Any]] = {
    "global batch": {"aux_over": "global_batch", "aux_loss": 10.0},
    "sequence, device and z": {"aux_loss": 1.0, "device_loss": 2.0, "devices": 4, "z_loss": 0.1, "score": "sigmoid"},
    "previous batch": {"aux_over": "previous_batch", "aux_loss": 10.0, "device_loss": 5.0, "devices": 2},
}
MICRO = {"aux_over": "microbatch", "aux_loss": 10.0}
CASES: dict[tuple[Way, str], dict[str, Any]] = {
    **{(way, "global batch"): KINDS["global batch"] for way in WAYS},
    **{(way, kind): KINDS[kind] for way in [WAYS[0], *SOME] for kind in KINDS},
    **{(way, "microbatch"): MICRO for way in WITHIN},
    (Way(1, 8), "all in one microbatch"): MICRO,
}
Traces = dict[tuple[Way, str], list[list[TraceEntry]]]


def compute_again(run: Run) -> None:
    for block in run.model.blocks:
        steps = block.steps()
        again = Step(steps[0].spec, partial(checkpoint, run_step_sequence, steps, use_reentrant=False))
        block.steps = lambda again=again: [again]


def two_steps(world: World, cases: list[tuple[Way, dict[str, Any]]]) -> list[list[TraceEntry]]:
    """Everything that two steps give, and the sum of the balance losses over the batch, case by case."""
    traces = []
    for way, changes in cases:
        config = way.config(changes)
        here = create_world(world.rank, world.size, world.device, config.parallel)
        run = assemble_run(config, here, Path("."), corpus=random_corpus(config))
        if way.again:
            compute_again(run)
        summands = note_balance_losses(run)
        traces.append([seen for number in (1, 2) for seen in one_step(run, number, summands)])
    return traces


def note_balance_losses(run: Run) -> list[torch.Tensor]:
    """A list to which every microbatch's balance losses are added; before the first step, which binds the steps."""
    summands: list[torch.Tensor] = []
    predict = run.model.predict

    def noting(carry: dict[str, Any]) -> dict[str, Any]:
        if torch.is_grad_enabled():  # a survey is no part of the step's losses
            summands.append(carry["aux"].detach())
        return predict(carry)

    run.model.predict = noting
    return summands


def one_step(run: Run, number: int, summands: list[torch.Tensor]) -> list[TraceEntry]:
    summands.clear()
    seen = trace_one_step(run)
    total = all_reduce_no_grad(torch.stack(summands).sum(), run.world.axis("dp", "cp", "tp"))
    return [*seen, TraceEntry(f"step {number}: balance losses", (), total)]


@pytest.fixture(scope="module")
def traces() -> Traces:
    found: Traces = {}
    for size in (1, 2, 4, 8):
        names = [name for name in CASES if name[0].ranks == size]
        by_rank = run_ranks(two_steps, size, [(way, CASES[way, kind]) for way, kind in names])
        found |= {name: [rank[i] for rank in by_rank] for i, name in enumerate(names)}
    return found


def test_the_ways_are_twelve_and_differ_in_every_degree():
    assert len(set(WAYS)) == 12
    dp = {way.ranks // (way.tp * way.cp) for way in WAYS}
    assert all(len(v) >= 2 for v in (dp, {w.tp for w in WAYS}, {w.cp for w in WAYS}, {w.micro_batch for w in WAYS}))


@pytest.mark.extended
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_global_batch_loss_and_its_gradients_are_those_of_one_microbatch_on_one_rank(way: Way, traces: Traces):
    (plain,) = traces[Way(1, 8), "all in one microbatch"]
    assert first_mismatch(plain, traces[way, "global batch"], 1e-12) is None


@pytest.mark.extended
@pytest.mark.parametrize("way", SOME, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_do_not_depend_on_the_split_or_on_computing_again(kind: str, way: Way, traces: Traces):
    (whole,) = traces[WAYS[0], kind]
    assert first_mismatch(whole, traces[way, kind], 1e-12) is None


@pytest.mark.extended
@pytest.mark.parametrize("way", WITHIN[1:], ids=str)
def test_the_loss_of_a_microbatch_does_not_depend_on_how_it_is_cut(way: Way, traces: Traces):
    (whole,) = traces[WITHIN[0], "microbatch"]
    assert first_mismatch(whole, traces[way, "microbatch"], 1e-12) is None


@pytest.mark.extended
def test_kinds_of_balance_differ_so_that_agreeing_means_something(traces: Traces):
    (batch,), (micro,) = traces[Way(1, 2), "global batch"], traces[Way(1, 2), "microbatch"]
    difference = first_mismatch(batch, [micro], 1e-6)
    assert difference is not None
    assert "gradient" in difference.what
