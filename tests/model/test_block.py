"""A block is its steps, and an MoE layer is a sum over the chosen experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from moefold.anatomy.step_specs import block_step_specs
from moefold.comm import byte_counters
from moefold.config.run import AttentionConfig, BalanceConfig, ModelConfig, MoeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG
from moefold.kernels.facts import Facts
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters
from moefold.model.block import Block, DenseBlock, MoeBlock, make_transformer_block
from moefold.model.initialise import initialise_parameters
from moefold.model.norm import ResidualStream
from moefold.train.assemble import default_dtype
from tests.model.test_router import logits_by_loop, routed_by_loop
from tests.model.test_transport import plan_by_loop, taken_by_loop
from tests.support.models import choices, share, with_moe_keys
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=32,
    dense_ffn=24,
    init_std=0.4,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8, qk_norm="head"),
    moe=MoeConfig(experts=5, top_k=2, ffn=12, balance=BalanceConfig(aux_loss=0.1)),
)
FACTS = Facts("cpu", "fp64", hidden=16, ffn=12)
BINDINGS = {"chosen": BoundKernels(FACTS), "reference": BoundKernels(FACTS, [f"{op}=reference" for op in CATALOG])}
LENGTH, SEQUENCES = 7, 3


def make(kind: type[Block], model: ModelConfig = MODEL, kernels: str = "chosen") -> Any:
    with default_dtype(torch.float64):
        block = kind(model, 0, choices(model, LENGTH, BINDINGS[kernels]))
    initialise_parameters(block, seed=1)
    return block


def with_moe(**changes: Any) -> ModelConfig:
    return replace(MODEL, moe=with_moe_keys(MODEL.moe, **changes))


def carry() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    x_TD = torch.randn(SEQUENCES * LENGTH, 16, generator=generator, dtype=torch.float64).requires_grad_()
    aux = torch.zeros((), dtype=torch.float64)
    return {"stream": ResidualStream(x_TD), "token_shard": share(SEQUENCES, LENGTH), "aux": aux}


def attended() -> dict[str, Any]:
    """The carry behind attention, whose output is pending on the stream."""
    start = carry()
    generator = torch.Generator().manual_seed(2)
    x_TD = start["stream"].x_TD
    pending_TD = torch.randn(x_TD.shape, generator=generator, dtype=torch.float64).requires_grad_()
    return {**start, "stream": ResidualStream(x_TD, pending_TD)}


KINDS = {
    "dense": (DenseBlock, with_moe(dense_layers=1)),
    "moe": (MoeBlock, MODEL),
    "moe with shared experts": (MoeBlock, with_moe(shared_ffn=20)),
    "moe with gated shared experts": (MoeBlock, with_moe(shared_ffn=20, shared_gate=True)),
    "moe with biases": (MoeBlock, with_moe(biases=True, activation="clamped_swiglu")),
    "latent moe": (MoeBlock, with_moe(latent=6)),
    "latent moe with shared experts and biases": (MoeBlock, with_moe(latent=6, shared_ffn=20, biases=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_makes_the_kind_of_block_that_is_asked_for(kind: str):
    wanted, model = KINDS[kind]
    assert type(make_transformer_block(model, 0, choices(model, LENGTH, BINDINGS["chosen"]))) is wanted


def test_every_nth_layer_behind_the_dense_ones_has_experts():
    model = with_moe(every=3, dense_layers=4)
    kinds = [type(make_transformer_block(model, n, choices(model, LENGTH, BINDINGS["chosen"]))) for n in range(12)]
    assert [n for n, kind in enumerate(kinds) if kind is MoeBlock] == [5, 8, 11]
    assert set(kinds) == {DenseBlock, MoeBlock}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_names_and_the_order_of_the_anatomy(kind: str):
    make_kind, model = KINDS[kind]
    block = make(make_kind, model)
    assert [step.spec for step in block.steps()] == block_step_specs(model, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_has_exactly_the_parameters_its_anatomy_says(kind: str):
    make_kind, model = KINDS[kind]
    found = {p.name: p.tensor.numel() for p in declared_parameters(make(make_kind, model))}
    assert found == {w.name: w.size for spec in block_step_specs(model, 0) for w in spec.weights}


@pytest.mark.parametrize("kind", KINDS)
def test_running_the_steps_one_by_one_equals_forward_to_the_bit(kind: str):
    block = make(*KINDS[kind])
    whole, stepwise = block(carry()), carry()
    for step in block.steps():
        stepwise = step.run(stepwise)
    assert whole.keys() == stepwise.keys() == {"stream", "token_shard", "aux"}, "nothing else stays in the carry"
    assert torch.equal(whole["stream"].x_TD, stepwise["stream"].x_TD)
    assert torch.equal(whole["stream"].pending_TD, stepwise["stream"].pending_TD)
    assert torch.equal(whole["aux"], stepwise["aux"])


def gated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return down @ (F.silu(gate_up[0] @ x) * (gate_up[1] @ x))


def expert(p: dict[str, torch.Tensor], e: int, x: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """One token through one routed expert."""
    gate, up = p["experts.gate_up"][e] @ x + (p["experts.gate_up_bias"][e] if moe.biases else 0)
    if moe.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=moe.clamp), up.clamp(-moe.clamp, moe.clamp)
        inner = (up + 1) * gate * (1.702 * gate).sigmoid()
    else:
        inner = up * F.silu(gate)
    return p["experts.down"][e] @ inner + (p["experts.down_bias"][e] if moe.biases else 0)


def choices_by_loop(logits: list[list[torch.Tensor]], moe: MoeConfig) -> list[list[int]] | None:
    """Those that are not each token's own."""
    if moe.router.force_balance:
        return [[(t * moe.top_k + k) % moe.experts for k in range(moe.top_k)] for t in range(len(logits))]
    if moe.router.kind == "token_choice":
        return None
    plain = [[one.item() for one in row] for row in logits]
    by_sequence = [plain[b * LENGTH : (b + 1) * LENGTH] for b in range(SEQUENCES)]
    if moe.router.kind == "expert_choice":
        most = math.ceil((moe.capacity.factor or 1) * LENGTH * moe.top_k / moe.experts)
        return [row for one in by_sequence for row in taken_by_loop(one, most)]
    plans = [row for one in by_sequence for row in plan_by_loop(one)]
    return [sorted(range(moe.experts), key=lambda e, row=row: (-row[e], e))[: moe.top_k] for row in plans]


def by_loop(block: MoeBlock, model: ModelConfig, x_TD: torch.Tensor) -> torch.Tensor:
    p, moe = dict(block.moe.named_parameters()), model.moe
    h_TD = [x / (x.square().mean() + model.norm_eps).sqrt() * p["norm.weight"] for x in x_TD]
    logits = logits_by_loop(torch.stack(h_TD), p["router.weight"], p.get("router.bias"))
    imposed = choices_by_loop(logits, moe)
    rows = []
    for t, (x, h) in enumerate(zip(x_TD, h_TD, strict=True)):
        if imposed and max(imposed[t]) < 0:  # nobody took this token
            weights, ids = torch.zeros(1, 1), [[-1]]
        else:
            wanted = [imposed[t]] if imposed else None
            weights, ids = routed_by_loop([logits[t]], [0.0] * moe.experts, moe, wanted)
        travelling = p["narrow.weight"] @ h if moe.latent else h
        y = 0 * travelling
        for weight, e in zip(weights[0], ids[0], strict=True):
            y = y + weight * expert(p, e, travelling, moe) if e >= 0 else y
        y = p["widen.weight"] @ y if moe.latent else y
        if moe.shared_ffn:
            shared = gated(h, p["shared.gate_up.weight"], p["shared.down.weight"])
            y = y + ((p["shared.gate.weight"] @ h).sigmoid() * shared if moe.shared_gate else shared)
        rows.append(x + y)
    return torch.stack(rows)


CHANGES: list[dict[str, Any]] = [
    {},
    {"normalize": "none"},
    {"shared_ffn": 20},
    {"top_k": 5},
    {"top_k": 1},
    {"experts": 1, "top_k": 1},
    {"score": "sigmoid", "normalize": "all", "scale": 2.5, "shared_ffn": 20, "shared_gate": True},
    {"score": "softmax_chosen", "biases": True, "activation": "clamped_swiglu", "clamp": 0.8},
    {"biases": True, "gate": "output", "pad_rows": 4},
    {"latent": 6, "shared_ffn": 20, "shared_gate": True, "groups": 5, "groups_chosen": 3},
    {"latent": 6, "biases": True, "gate": "output"},
    {"force_balance": True},
    {"router": "expert_choice", "normalize": "none", "biases": True},
    {"router": "expert_choice", "score": "sigmoid", "latent": 6, "capacity_factor": 0.5},
    {"router": "sinkhorn", "score": "sigmoid"},
]


def fill_biases(block: Any) -> None:
    """They begin at zero, where nothing would be seen of them."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, p in block.moe.named_parameters():
            if name.endswith("bias"):
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_an_moe_layer_equals_a_loop_over_tokens_and_experts_with_its_gradients(changes: dict[str, Any], kernels: str):
    model = with_moe(**changes)
    block = make(MoeBlock, model, kernels)
    fill_biases(block)
    state = start = attended()
    for step in block.steps()[1:]:
        state = step.run(state)
    stream = start["stream"]
    mine, plain = state["stream"].settled(), by_loop(block, model, stream.settled())
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)

    direction = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = {"x": stream.x_TD, "pending": stream.pending_TD, **dict(block.moe.named_parameters())}
    for name, a, b in zip(wanted, *(torch.autograd.grad(y, list(wanted.values()), direction) for y in (mine, plain))):  # noqa: B905
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"gradient of {n}: {m}")


def test_a_dense_block_adds_its_gated_mlp_to_the_stream():
    block = make(DenseBlock, KINDS["dense"][1])
    start = attended()
    out, stream = block.mlp(start)["stream"].settled(), start["stream"].settled()
    p = dict(block.dense.named_parameters())
    rows = [x / (x.square().mean() + MODEL.norm_eps).sqrt() * p["norm.weight"] for x in stream]
    mlp = torch.stack([gated(h, p["gate_up.weight"], p["down.weight"]) for h in rows])
    torch.testing.assert_close(out, stream + mlp, rtol=1e-12, atol=1e-12)


def test_the_balance_loss_adds_up_in_the_carry():
    block = make(MoeBlock)
    start = carry()
    first = block(start)["aux"]
    second = block({**start, "aux": torch.tensor(5.0, dtype=torch.float64)})["aux"]
    assert first > 0
    torch.testing.assert_close(second, first + 5.0, rtol=1e-14, atol=0)


def counts(world: World, again: bool) -> dict[str, Any]:
    """What a block with experts on two ranks notes of one forward and backward, and what it sent in the forward."""
    model = with_moe(experts=4, capacity_factor=0.7, jitter=0.1, z_loss=0.1)
    with default_dtype(torch.float64):
        block = MoeBlock(model, 0, choices(model, LENGTH, BINDINGS["chosen"], world))
    initialise_parameters(block, seed=1)
    start = carry()
    with byte_counters.counted_bytes_sent() as sent:
        out: Any = checkpoint(block, start, use_reentrant=False) if again else block(start)
    (out["stream"].settled().square().sum() + out["aux"]).backward()
    load = block.moe.router.load
    gradients = {name: p.grad for name, p in block.named_parameters()}
    noted = {"counts": load.counts_E.tolist(), "dropped": load.dropped.item(), "moved": load.moved}
    return {**noted, "sent": sum(sent.values()), "aux": out["aux"].item(), "gradients": gradients}


def test_what_is_counted_and_the_gradients_are_the_same_when_a_block_is_computed_again():
    once, again = (run_ranks(counts, 2, a, ep=2)[0] for a in (False, True))
    assert sum(once["counts"]) == SEQUENCES * LENGTH * 2
    assert 0 < once["dropped"] < SEQUENCES * LENGTH * 2
    assert 0 < once["moved"] <= once["sent"], "rows travelled to the other rank's experts and back"
    for name in ("counts", "dropped", "moved", "aux"):
        assert once[name] == again[name], name
    assert all(torch.equal(value, again["gradients"][name]) for name, value in once["gradients"].items())
