"""Expert load is evened out the same way however a batch is split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig
from moefold.kernels.bind import bind
from moefold.kernels.catalog import Facts
from moefold.layout.axes import Axis, World, alone
from moefold.model.initialise import initialise
from moefold.model.moe.balance import Load, sequence_balance_loss, update_loads
from moefold.model.moe.router import Router
from tests.support.models import share, transformer
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=32,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, bias_rate=0.01, aux_loss=0.25),
)
ALONE = Axis("world")


def make_router() -> Router:
    router = Router(MODEL, bind(Facts("cpu", "fp32")), alone())
    initialise(router, seed=1)
    return router


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_perfect_balance_costs_exactly_the_coefficient_per_token(sequences: int):
    tokens, experts = 32, 4
    scores = torch.full((tokens, experts), 1 / experts)
    ids = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) + 1) % experts], dim=1)
    assert (
        make_router().balance_loss(scores, ids, share(sequences, tokens // sequences)) / tokens
    ).item() == MODEL.moe.aux_loss


def test_imbalance_costs_more_and_a_coefficient_of_zero_costs_nothing():
    scores = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    ids = torch.tensor([[0, 1]]).expand(8, 2)
    assert sequence_balance_loss(scores, ids, share(2, 4), ALONE) / 8 == pytest.approx(4 * (0.5 * 0.7 + 0.5 * 0.1))
    router = make_router()
    router.moe = replace(router.moe, aux_loss=0.0)
    assert router.balance_loss(scores, ids, share(2, 4)) == 0


def test_the_loss_equals_its_formula_written_out():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(12, 4, generator=generator, dtype=torch.float64).softmax(-1)
    ids = scores.topk(2).indices
    total = 0.0
    for b in range(3):
        rows = range(4 * b, 4 * b + 4)
        for e in range(4):
            of_choices = sum(ids[t].tolist().count(e) for t in rows) / (4 * 2)
            total += 4 * 4 * of_choices * sum(scores[t, e].item() for t in rows) / 4
    assert sequence_balance_loss(scores, ids, share(3, 4), ALONE).item() == pytest.approx(total, rel=1e-14)


def test_the_loss_of_fp64_scores_is_exact_for_shares_that_are_no_power_of_two():
    scores = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    ids = torch.tensor([[0], [1], [2]])
    assert sequence_balance_loss(scores, ids, share(1, 3), ALONE).item() == pytest.approx(3.0, rel=1e-14)


@pytest.mark.parametrize("parts", [(8,), (4, 4), (1, 7), (1, 2, 5), (1,) * 8])
def test_the_loss_of_a_batch_is_the_sum_over_its_sequences_however_it_is_split(parts: tuple[int, ...]):
    router = make_router().double()
    h_BSD = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, whole = router(h_BSD.flatten(0, 1), share(8, 6))
    split = sum(router(part.flatten(0, 1), share(len(part), 6))[1] for part in h_BSD.split(parts))
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=0)


def test_the_bias_moves_against_the_load_by_one_step_and_counting_starts_anew():
    load = Load(4)
    load.count(torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1]]))
    assert load.counts_E.tolist() == [4, 3, 1, 0]
    counts = update_loads([load], 0.5, ALONE)
    assert counts.tolist() == [[4, 3, 1, 0]]
    assert load.bias_E.tolist() == [-0.5, -0.5, 0.5, 0.5]
    assert load.counts_E.tolist() == [0, 0, 0, 0]
    load.count(torch.tensor([[0], [1], [2], [3]]))
    update_loads([load], 0.5, ALONE)
    assert load.bias_E.tolist() == [-0.5, -0.5, 0.5, 0.5], "an even load moves nothing"


def test_a_rate_of_zero_leaves_the_bias_and_still_counts_anew():
    load = Load(2)
    load.count(torch.tensor([[0], [0]]))
    update_loads([load], 0.0, ALONE)
    assert load.bias_E.tolist() == [0, 0]
    assert load.counts_E.tolist() == [0, 0]


def test_enough_updates_bring_a_neglected_expert_back():
    router = make_router()
    with torch.no_grad():
        router.weight[3] = -1.0
    h_TD = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).abs()
    assert 3 not in router(h_TD, share(1, len(h_TD)))[0].ids_TK
    for _ in range(100):
        router(h_TD, share(1, len(h_TD)))
        update_loads([router.load], 0.01, ALONE)
    assert 3 in router(h_TD, share(1, len(h_TD)))[0].ids_TK


def test_the_bias_is_fp32_and_part_of_the_state_and_counts_are_not():
    assert set(Load(4).state_dict()) == {"bias_E"}
    assert Load(4).bias_E.dtype == torch.float32


def test_nothing_is_counted_in_eval_mode():
    router, h_TD = make_router(), torch.randn(10, 16)
    router.eval()
    router(h_TD, share(1, len(h_TD)))
    assert router.load.counts_E.sum() == 0
    router.train()
    router(h_TD, share(1, len(h_TD)))
    assert router.load.counts_E.sum() == 20


def three_steps(world: World) -> tuple[list[list[float]], list[list[int]]]:
    """The selection biases and the last counts after three batches of 8 sequences, split over the ranks."""
    model = transformer(MODEL, 6, bind(Facts("cpu", "fp32", hidden=16, ffn=16)), world)
    initialise(model, seed=1)
    counts = torch.empty(0)
    for step in range(3):
        batch = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(step))
        dp = world.axis("dp")
        for part in batch.tensor_split(dp.size)[dp.index].split(3):
            model(part, part)
        counts = model.balance()
    biases = [module.bias_E.tolist() for module in model.modules() if isinstance(module, Load)]
    return biases, counts.tolist()


def test_biases_and_counts_are_identical_on_one_two_and_four_ranks():
    (alone,) = run_ranks(three_steps, 1)
    assert any(any(row) for row in alone[0]), "the biases moved"
    assert [sum(row) for row in alone[1]] == [8 * 6 * 2] * 2
    assert run_ranks(three_steps, 2) == [alone] * 2
    assert run_ranks(three_steps, 4) == [alone] * 4


def test_a_model_without_a_single_moe_layer_has_nothing_to_balance():
    model = transformer(replace(MODEL, moe=replace(MODEL.moe, dense_layers=2)), 6, bind(Facts("cpu", "fp32")))
    assert len(model.balance()) == 0
