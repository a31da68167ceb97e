"""A block is its steps, and an MoE layer is a sum over the chosen experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefold.anatomy.steps import block_steps
from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig
from moefold.kernels.bind import bind
from moefold.kernels.catalog import CATALOG, Facts
from moefold.layout.declare import declared_parameters
from moefold.model.block import Block, DenseBlock, MoeBlock
from moefold.model.initialise import initialise
from moefold.train.assemble import default_dtype
from tests.support.models import choices, share

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=32,
    dense_ffn=24,
    init_std=0.4,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8, qk_norm="head"),
    moe=MoeConfig(experts=5, top_k=2, ffn=12, aux_loss=0.1),
)
FACTS = Facts("cpu", "fp64", hidden=16, ffn=12)
BINDINGS = {"chosen": bind(FACTS), "reference": bind(FACTS, [f"{op}=reference" for op in CATALOG])}
LENGTH, SEQUENCES = 7, 3


def make(kind: type[Block], model: ModelConfig = MODEL, kernels: str = "chosen") -> Any:
    with default_dtype(torch.float64):
        block = kind(model, 0, choices(model, LENGTH, BINDINGS[kernels]))
    initialise(block, seed=1)
    return block


def with_moe(**changes: Any) -> ModelConfig:
    return replace(MODEL, moe=replace(MODEL.moe, **changes))


def carry() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    x_TD = torch.randn(SEQUENCES * LENGTH, 16, generator=generator, dtype=torch.float64).requires_grad_()
    return {"x_TD": x_TD, "share": share(SEQUENCES, LENGTH), "aux": torch.zeros((), dtype=torch.float64)}


KINDS = {
    "dense": (DenseBlock, with_moe(dense_layers=1)),
    "moe": (MoeBlock, MODEL),
    "moe with shared experts": (MoeBlock, with_moe(shared_ffn=20)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_names_and_the_order_of_the_anatomy(kind: str):
    make_kind, model = KINDS[kind]
    block = make(make_kind, model)
    assert [step.spec for step in block.steps()] == block_steps(model, 0)
    assert [step.run.__name__ for step in block.steps()] == [spec.name for spec in block_steps(model, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_has_exactly_the_parameters_its_anatomy_says(kind: str):
    make_kind, model = KINDS[kind]
    found = {p.name: p.tensor.numel() for p in declared_parameters(make(make_kind, model))}
    assert found == {w.name: w.size for spec in block_steps(model, 0) for w in spec.weights}


@pytest.mark.parametrize("kind", KINDS)
def test_running_the_steps_one_by_one_equals_forward_to_the_bit(kind: str):
    block = make(*KINDS[kind])
    whole, stepwise = block(carry()), carry()
    for step in block.steps():
        stepwise = step.run(stepwise)
    assert whole.keys() == stepwise.keys() == {"x_TD", "share", "aux"}, "nothing else stays in the carry"
    assert torch.equal(whole["x_TD"], stepwise["x_TD"])
    assert torch.equal(whole["aux"], stepwise["aux"])


def gated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return down @ (F.silu(gate_up[0] @ x) * (gate_up[1] @ x))


def by_loop(block: MoeBlock, model: ModelConfig, x_TD: torch.Tensor) -> torch.Tensor:
    p = dict(block.moe.named_parameters())
    rows = []
    for x in x_TD:
        h = x / (x.square().mean() + model.norm_eps).sqrt() * p["norm.weight"]
        scores = torch.stack([h @ w for w in p["router.weight"]]).softmax(0)
        order = sorted(range(model.moe.experts), key=lambda e: -scores[e].item())[: model.moe.top_k]
        total = sum(scores[e] for e in order) if model.moe.normalize_top_k else 1.0
        y = x
        for e in order:
            y = y + scores[e] / total * gated(h, p["experts.gate_up"][e], p["experts.down"][e])
        if model.moe.shared_ffn:
            y = y + gated(h, p["shared.gate_up.weight"], p["shared.down.weight"])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"normalize_top_k": False}, {"shared_ffn": 20}, {"top_k": 5}, {"top_k": 1}, {"experts": 1, "top_k": 1}],
)
def test_an_moe_layer_equals_a_loop_over_tokens_and_experts_with_its_gradients(changes: dict[str, Any], kernels: str):
    model = with_moe(**changes)
    block = make(MoeBlock, model, kernels)
    start = carry()
    state = start
    for step in block.steps()[1:]:  # without attention
        state = step.run(state)
    mine, plain = state["x_TD"], by_loop(block, model, start["x_TD"])
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)

    direction = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = {"x": start["x_TD"], **dict(block.moe.named_parameters())}
    for name, a, b in zip(wanted, *(torch.autograd.grad(y, list(wanted.values()), direction) for y in (mine, plain))):  # noqa: B905
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"gradient of {n}: {m}")


def test_a_dense_block_adds_its_gated_mlp_to_the_stream():
    block = make(DenseBlock, KINDS["dense"][1])
    start = carry()
    out = block.mlp(start)["x_TD"]
    p = dict(block.dense.named_parameters())
    rows = [x / (x.square().mean() + MODEL.norm_eps).sqrt() * p["norm.weight"] for x in start["x_TD"]]
    mlp = torch.stack([gated(h, p["gate_up.weight"], p["down.weight"]) for h in rows])
    torch.testing.assert_close(out, start["x_TD"] + mlp, rtol=1e-12, atol=1e-12)


def test_the_balance_loss_adds_up_in_the_carry():
    block = make(MoeBlock)
    start = carry()
    first = block(start)["aux"]
    second = block({**start, "aux": torch.tensor(5.0, dtype=torch.float64)})["aux"]
    assert first > 0
    torch.testing.assert_close(second, first + 5.0, rtol=1e-14, atol=0)
