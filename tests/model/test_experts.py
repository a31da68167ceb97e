"""What the experts compute, and what they keep for the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from moefold.config.run import ModelConfig, MoeConfig
from moefold.dispatch.base import Routing, RowPolicy
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG
from moefold.kernels.facts import Facts
from moefold.layout.axes import single_rank_world
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.experts import Experts
from moefold.train.assemble import default_dtype
from tests.support.models import with_moe_keys

TOKENS, HIDDEN, K = 64, 32, 2
MODEL = ModelConfig(hidden=HIDDEN, moe=MoeConfig(experts=4, top_k=K, ffn=16))


def saved_bytes(gate: str) -> int:
    """Bytes of all tensors that forward keeps, each storage once, weights and inputs aside."""
    kernels = BoundKernels(Facts("cpu", "bf16", hidden=HIDDEN, ffn=16))
    with default_dtype(torch.bfloat16):
        experts = Experts(replace(MODEL, moe=replace(MODEL.moe, gate=gate)), kernels, single_rank_world())
    initialise_parameters(experts, seed=1)
    h = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    probs = torch.rand(TOKENS, K, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    ids = torch.stack((torch.arange(TOKENS) % 4, (torch.arange(TOKENS) + 1) % 4), dim=1)
    dispatcher = LocalDispatcher(RowPolicy(contiguous_placement(4)), kernels)
    rows = dispatcher.dispatch(h, dispatcher.plan(Routing(probs, ids)))
    known = {t.untyped_storage().data_ptr() for t in (*experts.parameters(), h, probs, *rows.order[:4])}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        y = experts(rows)
    alive = y.sum()  # noqa: F841  keeps the graph, so that no storage is used twice
    return sum(kept.values())


def test_the_gate_inside_the_activation_saves_exactly_the_experts_output():
    assert saved_bytes("output") - saved_bytes("activation") == TOKENS * K * HIDDEN * 2


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"biases": True},
    "clamped": {"activation": "clamped_swiglu", "clamp": 0.6},
    "clamped, biases": {"activation": "clamped_swiglu", "clamp": 0.6, "biases": True},
    "a latent": {"latent": 3, "biases": True},
    "geglu": {"activation": "geglu"},
    "geglu by tanh, biases": {"activation": "geglu_tanh", "biases": True},
    "reglu": {"activation": "reglu"},
    "silu without a gate": {"activation": "silu", "biases": True},
    "gelu without a gate": {"activation": "gelu"},
    "gelu by tanh without a gate": {"activation": "gelu_tanh"},
    "relu without a gate": {"activation": "relu", "biases": True},
    "squared relu without a gate, a latent": {"activation": "relu2", "latent": 3, "biases": True},
}
FACTS = Facts("cpu", "fp64", hidden=4, ffn=3)
BINDINGS = {"chosen": BoundKernels(FACTS), "reference": BoundKernels(FACTS, [f"{op}=reference" for op in CATALOG])}
IDS = [[0, 2], [1, 2], [2, -1], [0, 1], [-1, -1]]  # nobody goes to the last expert


def make_experts(kernels: str, **changes: Any) -> Experts:
    model = ModelConfig(
        hidden=4, init_std=0.8, layers=1, moe=with_moe_keys(MoeConfig(experts=4, top_k=2, ffn=3), **changes)
    )
    with default_dtype(torch.float64):
        experts = Experts(model, BINDINGS[kernels], single_rank_world())
    initialise_parameters(experts, seed=1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for bias in (experts.first_bias, experts.down_bias):
            if bias is not None:
                bias.copy_(0.5 * torch.randn(bias.shape, generator=generator))
    return experts


FUNCTIONS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
}
OF_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def inner_by_loop(p: dict[str, torch.Tensor], e: int, f: int, x: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """One number of an expert's inner width."""
    name = moe.activation
    if name in FUNCTIONS:  # without a gate
        up = (p["up"][e, f] * x).sum() + (p["up_bias"][e, f] if moe.biases else 0)
        return FUNCTIONS[name](up)
    gate, up = ((p["gate_up"][e, half, f] * x).sum() for half in (0, 1))
    if moe.biases:
        gate, up = gate + p["gate_up_bias"][e, 0, f], up + p["gate_up_bias"][e, 1, f]
    if name == "clamped_swiglu":
        gate, up = gate.clamp(max=moe.clamp), up.clamp(-moe.clamp, moe.clamp) + 1
        return up * gate / (1 + (-1.702 * gate).exp())
    return FUNCTIONS[OF_GATES[name]](gate) * up


def one_by_loop(p: dict[str, torch.Tensor], e: int, x: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """One token through one expert, one number after another."""
    inner = [inner_by_loop(p, e, f, x, moe) for f in range(moe.ffn)]
    y = torch.stack([sum(p["down"][e, d, f] * inner[f] for f in range(moe.ffn)) for d in range(len(x))])
    return y + p["down_bias"][e] if moe.biases else y


def by_loop(p: dict[str, torch.Tensor], h_TD: torch.Tensor, weights_TK: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    rows = []
    for t, ids in enumerate(IDS):
        chosen = [(k, e) for k, e in enumerate(ids) if e >= 0]
        rows.append(0 * h_TD[t] + sum(weights_TK[t, k] * one_by_loop(p, e, h_TD[t], moe) for k, e in chosen))
    return torch.stack(rows)


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("gate", ["activation", "output"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_expert_equals_a_loop_and_its_gradients_pass_gradcheck(variant: str, gate: str, kernels: str):
    experts = make_experts(kernels, gate=gate, **VARIANTS[variant])
    moe = with_moe_keys(MoeConfig(experts=4, top_k=2, ffn=3, gate=gate), **VARIANTS[variant])
    dispatcher = LocalDispatcher(RowPolicy(contiguous_placement(4), drops=True, multiple=3), BINDINGS[kernels])
    generator = torch.Generator().manual_seed(2)
    shapes = (5, moe.latent or 4), (5, 2)
    h_TD, weights_TK = (torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    leaves = {name: p.detach().requires_grad_() for name, p in experts.named_parameters()}
    assert ("down_bias" in leaves) == moe.biases

    def mine(h: torch.Tensor, probs: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        receipt = dispatcher.plan(Routing(probs, torch.tensor(IDS)))
        rows = dispatcher.dispatch(h, receipt)
        return dispatcher.combine(functional_call(experts, dict(zip(leaves, values, strict=True)), (rows,)), receipt)

    wanted = (h_TD, weights_TK, *leaves.values())
    expected = by_loop(leaves, h_TD, weights_TK, moe)
    torch.testing.assert_close(mine(*wanted), expected, rtol=1e-12, atol=1e-12)
    direction = torch.arange(expected.numel()).view_as(expected).cos().double()
    found = torch.autograd.grad(mine(*wanted), wanted, direction)
    for name, a, b in zip(
        ("h", "probs", *leaves), found, torch.autograd.grad(expected, wanted, direction), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"gradient of {n}: {m}")
    assert torch.autograd.gradcheck(mine, wanted, fast_mode=True)


def test_the_clamp_is_reached_on_both_sides_by_what_is_tested():
    experts = make_experts("reference", activation="clamped_swiglu", clamp=0.6)
    h = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gate, up = torch.einsum("eafd,td->aetf", experts.gate_up, h)
    assert (gate > 0.6).any()
    assert (gate < -0.6).any(), "and the gate is cut off on one side only"
    assert (up > 0.6).any()
    assert (up < -0.6).any()
