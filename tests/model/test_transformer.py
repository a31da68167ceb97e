"""The whole model: its losses, its steps, its regions and what it holds in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import moefold.kernels.vocabulary.cross_entropy as cross_entropy_file
from moefold.anatomy.model_totals import total_parameters
from moefold.anatomy.step_specs import prefixed_model_steps, prefixed_mtp_steps
from moefold.config.run import AttentionConfig, BalanceConfig, ModelConfig, MoeConfig, OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.registry import OPS
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.dtypes import DTYPES
from moefold.model.initialise import initialise_parameters
from moefold.model.steps import Region
from moefold.model.transformer import Transformer
from moefold.optim.optimizer import build_optimizer
from moefold.shard.buckets import fill_buckets
from moefold.shard.gradients import Gradients
from moefold.train.assemble import default_dtype
from tests.support.models import transformer

LENGTH = 8
MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=48,
    dense_ffn=24,
    init_std=0.2,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8, qk_norm="head"),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, balance=BalanceConfig(aux_loss=0.1, bias_rate=0.01)),
)
RICH = replace(MODEL, layers=3, moe=replace(MODEL.moe, dense_layers=1, shared_ffn=20))
LATENT = replace(RICH, moe=replace(RICH.moe, shared_gate=True, latent=8, biases=True, activation="clamped_swiglu"))
AHEAD = replace(
    RICH,
    layers=4,
    mtp=2,
    moe=replace(
        RICH.moe,
        every=2,
        router=replace(RICH.moe.router, score="sigmoid"),
        balance=replace(RICH.moe.balance, z_loss=0.01),
    ),
)


def make(model: ModelConfig = MODEL, dtype: str = "fp64") -> Transformer:
    with default_dtype(DTYPES[dtype]):
        made = transformer(model, LENGTH, BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16)))
    initialise_parameters(made, seed=1)
    return made


def batch(model: ModelConfig = MODEL, sequences: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(model.vocab, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def gradients(model: Transformer, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    losses = model(tokens, labels)
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = losses.cross_entropy + losses.balance + losses.ahead_M.sum()
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


@pytest.mark.parametrize("model", [MODEL, RICH, LATENT, AHEAD], ids=["moe", "dense first", "latent", "ahead"])
def test_running_the_steps_one_by_one_equals_forward_to_the_bit(model: ModelConfig):
    made, (tokens, labels) = make(model), batch()
    carry: dict[str, Any] = made.begin(tokens, labels)
    for step in made.steps(made.stages[0]):
        carry = step.run(carry)
    losses = made(tokens, labels)
    assert torch.equal(carry["losses_1M"], torch.stack((losses.cross_entropy, *losses.ahead_M)))
    assert len(losses.ahead_M) == model.mtp
    assert torch.equal(carry["aux"], losses.balance)


@pytest.mark.parametrize("model", [MODEL, RICH, replace(RICH, tied_head=True), LATENT, AHEAD])
def test_steps_and_parameters_are_those_of_the_anatomy(model: ModelConfig):
    made = make(model)
    *body, last = prefixed_model_steps(model)
    every = [*body, *prefixed_mtp_steps(model), last]
    assert [step.spec for step in made.steps(made.stages[0])] == [spec for _, spec in every]
    found = {p.name: p.tensor.numel() for p in declared_parameters(made)}
    assert found == {prefix + w.name: w.size for prefix, spec in every for w in spec.weights}
    ahead = {name: size for name, size in found.items() if name.startswith("ahead")}
    assert sum(found.values()) - sum(ahead.values()) == total_parameters(model)
    made.eval()
    assert [step.spec for step in made.steps(made.stages[0])] == [spec for _, spec in prefixed_model_steps(model)], (
        "further tokens are for training"
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_loss_is_the_cross_entropy_of_the_logits_summed_over_tokens(dtype: str):
    made, (tokens, labels) = make(dtype=dtype), batch()
    logits = made.logits(tokens)
    assert logits.shape == (*tokens.shape, MODEL.vocab)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(
        made(tokens, labels).cross_entropy, expected, rtol=1e-5 if dtype == "fp32" else 1e-12, atol=0
    )


def test_ignored_labels_count_nothing():
    made, (tokens, labels) = make(), batch()
    some = labels.clone()
    some[:, 2::3] = -100
    losses = made(tokens, some)
    kept = some != -100
    expected = F.cross_entropy(made.logits(tokens)[kept], labels[kept], reduction="sum")
    torch.testing.assert_close(losses.cross_entropy, expected, rtol=1e-12, atol=0)
    head = list(made.head.parameters())
    found = torch.autograd.grad(losses.cross_entropy, head)
    for mine, plain in zip(found, torch.autograd.grad(expected, head), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-13)


def test_a_batch_of_ignored_labels_has_no_loss_and_no_gradient():
    made, (tokens, labels) = (
        make(replace(MODEL, moe=replace(MODEL.moe, balance=replace(MODEL.moe.balance, aux_loss=0.0)))),
        batch(),
    )
    assert made(tokens, torch.full_like(labels, -100)).cross_entropy == 0
    assert all((g == 0).all() for g in gradients(made, tokens, torch.full_like(labels, -100)).values())


def test_a_batch_is_the_sum_of_its_parts():
    made, (tokens, labels) = make(), batch()
    whole = gradients(made, tokens, labels)
    parts = [gradients(made, t, y) for t, y in zip(tokens.split((1, 3)), labels.split((1, 3)), strict=True)]
    for name, value in whole.items():
        torch.testing.assert_close(value, parts[0][name] + parts[1][name], rtol=1e-12, atol=1e-13)


def test_a_later_token_changes_no_earlier_logits():
    made, (tokens, _) = make(), batch()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % MODEL.vocab
    before, after = made.logits(tokens), made.logits(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_a_tied_head_gets_the_gradients_of_both_of_its_uses():
    tied, free = make(replace(MODEL, tied_head=True)), make()
    with torch.no_grad():
        free.head.weight.copy_(free.embedding.weight)
    assert "head.weight" not in dict(tied.named_parameters())
    one, two = gradients(tied, *batch()), gradients(free, *batch())
    torch.testing.assert_close(
        one["embedding.weight"], two["embedding.weight"] + two["head.weight"], rtol=1e-12, atol=1e-12
    )
    assert all(two[name].norm() > 0 for name in ("embedding.weight", "head.weight"))


@pytest.mark.parametrize("model", [RICH, LATENT, AHEAD], ids=["dense first", "latent", "ahead"])
def test_checkpointing_every_region_gives_the_same_gradients_to_the_bit(model: ModelConfig):
    plain, recomputing = make(model, "fp32"), make(model, "fp32")
    every_region = [module for module in recomputing.modules() if isinstance(module, Region)]
    regions = [region for region in every_region if region.name != "swap"]  # which one cp rank does not do
    calls: list[str] = []

    def around(fn, *inputs):
        calls.append("region")
        return checkpoint(fn, *inputs, use_reentrant=False)

    for region in regions:
        region.around = around
    one, two = gradients(plain, *batch()), gradients(recomputing, *batch())
    assert len(calls) == len(regions) > 10
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("model", [RICH, LATENT, AHEAD], ids=["dense first, shared experts", "latent", "ahead"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_of_every_kind_trains(dtype: str, model: ModelConfig):
    made = make(model, dtype)
    world = single_rank_world()
    buckets = fill_buckets(made, world)
    sums = Gradients(buckets, world)
    optimizer = build_optimizer(buckets, OptimConfig(), BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16)))
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    tokens, labels = batch()
    seen = []
    for number in (1, 2):
        losses = made(tokens, labels)
        seen.append(losses.cross_entropy.item())
        sums.begin()
        (losses.cross_entropy + losses.balance + losses.ahead_M.sum()).backward()
        sums.finish(torch.tensor(float(labels.numel())))
        sums.clip(1.0)
        optimizer.step(number, 1e-2)
        made.balance()
    assert seen[1] < seen[0]
    assert all(not torch.equal(before[name], p) for name, p in made.named_parameters())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def largest_tensor(implementation: str, tokens: int, width: int, words: int) -> int:
    x = torch.randn(tokens, width, requires_grad=True)
    w = torch.randn(words, width, requires_grad=True)
    labels = torch.randint(words, (tokens,))
    with Largest() as seen:
        OPS["cross_entropy"].implementations[implementation](x, w, labels).backward()
    assert x.grad is not None
    assert w.grad is not None
    return seen.elements


def test_chunked_cross_entropy_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch):
    tokens, width, words = 100, 8, 200
    chunks = cross_entropy_file.PLAIN_CHUNKS._replace(logits=7 * words)
    monkeypatch.setattr(cross_entropy_file, "PLAIN_CHUNKS", chunks)
    assert largest_tensor("chunked", tokens, width, words) == max(7 * words, words * width)
    assert largest_tensor("reference", tokens, width, words) >= tokens * words, "the measure sees them where they are"


@pytest.mark.parametrize("chunk", [1, 7 * 48, 31 * 48, 32 * 48, 33 * 48])
def test_the_size_of_a_chunk_does_not_change_the_loss_or_the_gradients(chunk: int, monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 16, generator=generator, dtype=torch.float64).requires_grad_() for n in (32, 48))
    labels = torch.randint(48, (32,), generator=generator)
    labels[::5] = -100
    chunks = cross_entropy_file.PLAIN_CHUNKS._replace(logits=chunk)
    monkeypatch.setattr(cross_entropy_file, "PLAIN_CHUNKS", chunks)
    mine, plain = (OPS["cross_entropy"].implementations[name](x, w, labels) for name in ("chunked", "reference"))
    torch.testing.assert_close(mine, plain, rtol=1e-13, atol=0)
    for a, b in zip(torch.autograd.grad(3 * mine, (x, w)), torch.autograd.grad(3 * plain, (x, w)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


class Products(TorchDispatchMode):
    """How many matrix products were made."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


def test_without_gradients_the_head_makes_no_product_but_the_logits():
    made, (tokens, labels) = make(), batch()
    with torch.no_grad():
        x_TD = torch.randn(tokens.numel(), MODEL.hidden, dtype=torch.float64)
        with Products() as seen:
            made.head.loss(x_TD, labels.flatten())
    assert seen.count == 1
