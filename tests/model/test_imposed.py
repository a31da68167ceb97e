"""Choices that nobody makes: forced balance, and replay of what was chosen elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.run import AttentionConfig, BalanceConfig, ModelConfig, MoeConfig, ParallelConfig, RouterConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import Axis, World, create_world
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.forced_routing import recorded_choices
from moefold.model.moe.router import ExpertLoad
from moefold.model.moe.sequence_choice import round_robin_experts
from moefold.model.norm import ResidualStream
from moefold.model.token_layout import TokenShard
from moefold.model.transformer import Transformer
from moefold.train.assemble import default_dtype
from tests.model.test_router import logits_by_loop, make_router, routed_by_loop, tokens
from tests.support.models import share, transformer, with_moe_keys
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=3,
    hidden=8,
    vocab=32,
    dense_ffn=8,
    init_std=0.4,
    attention=AttentionConfig(heads=2, kv_heads=2, head_dim=4),
    moe=MoeConfig(
        experts=4,
        top_k=2,
        ffn=8,
        dense_layers=1,
        balance=BalanceConfig(aux_loss=0.1),
        router=RouterConfig(score="sigmoid"),
    ),
)
SEQUENCES, LENGTH = 3, 8


def make(model: ModelConfig = MODEL, world: World | None = None) -> Transformer:
    with default_dtype(torch.float64):
        made = transformer(model, LENGTH, BoundKernels(Facts("cpu", "fp64", hidden=8, ffn=8)), world)
    initialise_parameters(made, seed=1)
    return made


def with_moe(**changes: Any) -> ModelConfig:
    return replace(MODEL, moe=with_moe_keys(MODEL.moe, **changes))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(32, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def choices(k: int = 2, seed: int = 1) -> torch.Tensor:
    """(B, S, K): some different experts for each token."""
    liking = torch.rand(SEQUENCES, LENGTH, 4, generator=torch.Generator().manual_seed(seed))
    return liking.argsort(-1)[..., :k]


def with_holes(ids_BSK: torch.Tensor) -> torch.Tensor:
    """Some tokens lack a choice, and one has none."""
    holes = ids_BSK.clone()
    holes[:, 2::3, 1] = -1
    holes[1, 4] = -1
    return holes


def outcome(model: Transformer, imposed: dict[int, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Losses and all gradients."""
    losses = model(*batch(), imposed=imposed)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(losses.cross_entropy + losses.balance, parameters)
    return {"loss": losses.cross_entropy, "balance": losses.balance, **dict(zip(names, found, strict=True))}


@pytest.mark.parametrize(("experts", "k"), [(8, 3), (8, 2), (6, 4), (5, 5), (7, 1)])
def test_forced_balance_is_exactly_even_over_any_whole_number_of_rounds(experts: int, k: int):
    ids = round_robin_experts(torch.arange(2 * experts), MoeConfig(experts=experts, top_k=k))
    assert ids.flatten().bincount(minlength=experts).tolist() == [2 * k] * experts
    assert all(len(set(row)) == k for row in ids.tolist()), "each token visits different experts"
    some = ids[3:10].flatten().bincount(minlength=experts)
    assert some.max() - some.min() <= 1, "and any stretch is as even as can be"


def test_forced_balance_gives_a_token_the_same_experts_on_any_layout_and_in_any_microbatch():
    moe = MoeConfig(experts=8, top_k=3)
    whole = round_robin_experts(share(6, 16).token_number_T, moe)
    for cp, tp, size in itertools.product((1, 2, 4), (1, 2), (1, 2, 3, 6)):
        seen = 0
        for c, t, first in itertools.product(range(cp), range(tp), range(0, 6, size)):
            axes = Axis("cp", tuple(range(cp)), c), Axis("tp", tuple(range(tp)), t)
            number_T = TokenShard(size, 16, *axes, torch.device("cpu"), first).token_number_T
            assert torch.equal(round_robin_experts(number_T, moe), whole[number_T])
            seen += number_T.sum().item()
        assert seen == sum(range(6 * 16)), "each token once"


def test_a_model_that_is_forced_is_even_in_every_layer_whatever_its_router_says():
    made = make(with_moe(force_balance=True))
    for load in made.loads():
        load.bias_E.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    made(*batch())
    assert made.balance().counts_LE.tolist() == [[SEQUENCES * LENGTH * 2 // 4] * 4] * 2


IMPOSED = [[0, 5], [7, 2], [-1, 3], [-1, -1], [4, 1], [6, -1]]
WEIGHTS: list[dict[str, Any]] = [
    {"score": score, "normalize": normalize, "scale": 1.5}
    for score in ("softmax", "sigmoid")
    for normalize in ("chosen", "all", "none")
] + [{"score": "softmax_chosen"}]


@pytest.mark.parametrize("how", WEIGHTS, ids=str)
def test_imposed_choices_are_taken_and_their_weights_and_gradients_come_from_the_scores(how: dict[str, Any]):
    router, h_TD = make_router(torch.float64, 3, top_k=2, **how), tokens(6, 3, torch.float64).requires_grad_()
    weight, ids_TK = router.weight.detach().requires_grad_(), torch.tensor(IMPOSED)

    def weights(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional_call(router, {"weight": w}, (h, share(2, 3), ids_TK))[0].weights_TK

    assert torch.equal(router(h_TD, share(2, 3), ids_TK)[0].ids_TK, ids_TK)
    logits = logits_by_loop(h_TD, weight, None)
    if how["score"] == "softmax_chosen" or how["normalize"] == "chosen":  # no choice at all: nothing to divide by
        with_one = [row if max(row) >= 0 else [0, 0] for row in IMPOSED]
        expected = routed_by_loop(logits, [0.0] * 8, router.moe, with_one)[0]
        expected = expected * torch.tensor([[max(row) >= 0] for row in IMPOSED])
    else:
        expected = routed_by_loop(logits, [0.0] * 8, router.moe, IMPOSED)[0]
    torch.testing.assert_close(weights(h_TD, weight), expected, rtol=1e-12, atol=1e-12)
    direction = torch.arange(12.0, dtype=torch.float64).cos().view(6, 2)
    mine = torch.autograd.grad(weights(h_TD, weight), (h_TD, weight), direction)
    for a, b in zip(mine, torch.autograd.grad(expected, (h_TD, weight), direction), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(weights, (h_TD, weight))


KINDS: dict[str, ModelConfig] = {
    "token choice": MODEL,
    "with a capacity": with_moe(capacity_factor=0.75),
    "experts choose": with_moe(router="expert_choice", looks_ahead=True, aux_loss=0.0),
    "sinkhorn": with_moe(router="sinkhorn", looks_ahead=True),
    "with a selection bias": with_moe(bias_rate=0.1),
    "of a layer that looks ahead": replace(MODEL, mtp=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_what_was_chosen_gives_the_same_losses_and_gradients_to_the_bit(kind: str):
    made = make(KINDS[kind])
    with recorded_choices(made) as chosen:
        before = outcome(made)
    layers = [1, 2, 3][: 2 + KINDS[kind].mtp]
    assert list(chosen) == layers
    assert all(len(parts) == 1 for parts in chosen.values())
    for load in made.loads():
        load.bias_E.copy_(torch.tensor([9.0, -9.0, 3.0, 0.0]))  # would change the choice, were there one
    replayed = {layer: ids.unflatten(0, (SEQUENCES, LENGTH)) for layer, (ids,) in chosen.items()}
    after = outcome(made, replayed)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if KINDS[kind].moe.router.kind == "token_choice":
        assert not torch.equal(outcome(made)["loss"], before["loss"])


def test_imposed_choices_are_what_each_layer_counts_and_other_layers_choose_for_themselves():
    made, imposed = make(), torch.zeros(SEQUENCES, LENGTH, 2, dtype=torch.int64) + torch.tensor([3, 1])
    with recorded_choices(made) as chosen:
        made(*batch(), imposed={2: imposed})
    assert torch.equal(chosen[2][0], imposed.flatten(0, 1))
    assert not torch.equal(chosen[1][0], imposed.flatten(0, 1))
    assert made.balance().counts_LE.tolist()[1] == [0, 24, 0, 24]


def test_the_gradient_of_an_imposed_routers_weights_passes_gradcheck_through_the_whole_model():
    made, imposed = make(), {1: choices(), 2: choices(seed=2)}
    name = "blocks.1.moe.router.weight"

    def loss(weight: torch.Tensor) -> torch.Tensor:
        losses = functional_call(made, {name: weight}, batch(), {"imposed": imposed})
        return losses.cross_entropy + losses.balance

    weight = made.get_parameter(name).detach().requires_grad_()
    assert torch.autograd.gradcheck(loss, (weight,))
    assert torch.autograd.grad(loss(weight), weight)[0].norm() > 1e-3


def test_an_imposed_choice_of_no_expert_is_passed_by():
    imposed = {1: with_holes(choices()), 2: choices(seed=2)}
    mine = outcome(make(), imposed)
    plain = outcome(make(with_moe(capacity_factor=9.0)), imposed)  # whose dispatcher knows that choices may be missing
    for name, value in plain.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_choices_are_recorded_once_for_each_microbatch_also_where_a_block_is_computed_again():
    made = make()
    x_TD = torch.randn(SEQUENCES * LENGTH, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stream = ResidualStream(x_TD.requires_grad_())
    aux = torch.zeros((), dtype=x_TD.dtype)
    carry = {"stream": stream, "token_shard": share(SEQUENCES, LENGTH), "aux": aux}
    with recorded_choices(made) as chosen:
        out: Any = checkpoint(made.blocks[1], carry, use_reentrant=False)
        out["stream"].pending_TD.sum().backward()
        made.blocks[1](carry)
    assert len(chosen[1]) == 2


def test_recording_ends_with_its_block_also_when_that_fails():
    made = make()

    def fail() -> None:
        with recorded_choices(made):
            made(*batch())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(module.record is None for module in made.modules() if isinstance(module, ExpertLoad))


IMPOSED_ON_LAYOUTS = {1: with_holes(choices()), 2: choices(seed=2)}
LAYOUTS = [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}, {"cp": 4, "ep": 4}]


def imposed_loss(world: World, layouts: list[dict[str, int]]) -> list[dict[str, Any]]:
    """The loss with imposed choices on each layout, what each rank recorded, and which tokens those are."""
    found = []
    for layout in layouts:
        here = create_world(world.rank, world.size, world.device, ParallelConfig(**layout))
        made, dp = make(world=here), here.axis("dp")
        mine = [x.tensor_split(dp.size)[dp.index] for x in (*batch(), *IMPOSED_ON_LAYOUTS.values())]
        with recorded_choices(made) as chosen:
            losses = made(mine[0], mine[1], imposed={1: mine[2], 2: mine[3]})
        share_T = TokenShard(len(mine[0]), LENGTH, here.axis("cp"), here.axis("tp"), here.device)
        first = sum(len(part) for part in batch()[0].tensor_split(dp.size)[: dp.index]) * LENGTH
        total = all_reduce_no_grad(losses.cross_entropy.detach().clone(), here.axis("dp", "cp")).item()
        ids = {layer: parts[0].tolist() for layer, parts in chosen.items()}
        found.append({"loss": total, "ids": ids, "numbers": (first + share_T.token_number_T).tolist()})
    return found


def test_imposed_choices_reach_the_tokens_they_are_meant_for_on_any_layout():
    wanted = {layer: ids.flatten(0, 1).tolist() for layer, ids in IMPOSED_ON_LAYOUTS.items()}
    alone = outcome(make(), IMPOSED_ON_LAYOUTS)["loss"].item()
    for rank in run_ranks(imposed_loss, 4, LAYOUTS):
        for layout, found in zip(LAYOUTS, rank, strict=True):
            assert found["loss"] == pytest.approx(alone, rel=1e-12), layout
            for layer, ids in found["ids"].items():
                assert ids == [wanted[layer][number] for number in found["numbers"]], layout
