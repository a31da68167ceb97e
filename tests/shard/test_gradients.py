"""However a batch is split over ranks and microbatches, the gradient is that of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig, ParallelConfig
from moefold.kernels.bind import bind
from moefold.kernels.catalog import Facts
from moefold.kernels.registry import DTYPES
from moefold.layout.axes import World, name_axes
from moefold.model.initialise import initialise
from moefold.model.transformer import Transformer
from moefold.shard.buckets import fill_buckets
from moefold.shard.gradients import Gradients
from moefold.train.assemble import default_dtype
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=40,
    dense_ffn=24,
    init_std=0.2,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, shared_ffn=8, dense_layers=1, aux_loss=0.1),
)
LENGTH, SEQUENCES, MAX_NORM = 6, 7, 0.05
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}


def make(dtype: str, model: ModelConfig = MODEL) -> Transformer:
    with default_dtype(DTYPES[dtype]):
        made = Transformer(model, LENGTH, bind(Facts("cpu", dtype, hidden=16, ffn=16)))
    initialise(made, seed=1)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(MODEL.vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = rows[:, 1:].clone()
    labels[2, 3:] = -100  # ranks hold different numbers of counted tokens
    return rows[:, :-1], labels


def share(world: World) -> slice:
    """This rank's sequences of seven: an uneven share."""
    dp = world.axis("dp")
    return slice(SEQUENCES * dp.index // dp.size, SEQUENCES * (dp.index + 1) // dp.size)


def one_step(world: World, dtype: str, micro: tuple[int, ...]) -> dict[str, Any]:
    """Gradients before and after clipping, by name, and the norm; rank r takes microbatches of micro[r]."""
    model = make(dtype)
    buckets = fill_buckets(model)
    gradients = Gradients(buckets, world)
    tokens, labels = (x[share(world)] for x in batch())
    size = micro[world.rank % len(micro)]
    for t, y in zip(tokens.split(size), labels.split(size), strict=True):
        losses = model(t, y)
        (losses.cross_entropy + losses.balance).backward()
    gradients.finish((batch()[1] >= 0).sum())

    def named() -> dict[str, np.ndarray]:
        return {p.name: view.clone().numpy() for b in buckets for p, view in b.views(b.gradients)}

    before = named()
    norm = gradients.clip(MAX_NORM).item()
    return {"gradients": before, "norm": norm, "clipped": named()}


def whole(dtype: str) -> dict[str, Any]:
    """The same by plain autograd on the whole batch, without buckets."""
    model = make(dtype)
    tokens, labels = batch()
    losses = model(tokens, labels)
    (losses.cross_entropy + losses.balance).backward()
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = parameter.grad / (labels >= 0).sum()
    before = {name: p.grad.clone().numpy() for name, p in parameters.items() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM).item()
    after = {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}
    return {"gradients": before, "norm": norm, "clipped": after}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["norm"] == pytest.approx(expected["norm"], rel=tolerance)
    for kind in ("gradients", "clipped"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            off = np.linalg.norm(found[kind][name] - value) / np.linalg.norm(value)
            assert off <= tolerance, f"{kind} of {name}: off by {off:.1e}"


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("micro", [(7,), (1,), (3,)])
def test_microbatches_add_up_to_the_whole_batch(dtype: str, micro: tuple[int, ...]):
    world = name_axes(0, 1, torch.device("cpu"), ParallelConfig())
    assert_same(one_step(world, dtype, micro), whole(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(("size", "micro"), [(2, (2, 1)), (4, (1, 2, 2, 1))])
def test_any_number_of_ranks_gives_the_gradient_the_norm_and_the_clipping_of_one(dtype, size, micro):
    expected = whole(dtype)
    assert expected["norm"] > MAX_NORM, "clipping takes part"
    results = run_ranks(one_step, size, dtype, micro)
    for result in results:
        assert_same(result, expected, TOLERANCE[dtype])
        assert result["norm"] == results[0]["norm"], "every rank has the same norm to the bit"
        for name, value in result["clipped"].items():
            assert np.array_equal(value, results[0]["clipped"][name]), name


def ready(model: Transformer) -> Gradients:
    return Gradients(fill_buckets(model), name_axes(0, 1, torch.device("cpu"), ParallelConfig()))


def test_the_norm_counts_dense_and_expert_parameters_each_element_once():
    gradients = ready(make("fp32"))
    for bucket in gradients.buckets:
        for _, view in bucket.views(bucket.gradients):
            view.fill_(2.0)
    elements = {b.placement.grid: 0 for b in gradients.buckets}
    for bucket in gradients.buckets:
        elements[bucket.placement.grid] += sum(p.tensor.numel() for p in bucket.parameters)
    assert elements["expert"] > 0
    assert gradients.norm().item() == pytest.approx(2 * sum(elements.values()) ** 0.5, rel=1e-6)


def filled_norm(world: World) -> float:
    gradients = Gradients(fill_buckets(make("fp32")), world)
    for bucket in gradients.buckets:
        bucket.gradients.fill_(1.0)
    return gradients.norm().item()


def test_the_norm_does_not_grow_with_the_number_of_replicas():
    (alone,) = run_ranks(filled_norm, 1)
    assert run_ranks(filled_norm, 4) == [alone] * 4


def test_a_short_gradient_is_not_scaled_and_a_long_one_ends_at_the_limit():
    gradients = ready(make("fp64"))
    for bucket in gradients.buckets:
        bucket.gradients.fill_(1e-3)
    before = [b.gradients.clone() for b in gradients.buckets]
    norm = gradients.norm().item()
    assert gradients.clip(norm * 2).item() == norm
    assert all(torch.equal(a, b.gradients) for a, b in zip(before, gradients.buckets, strict=True))
    assert gradients.clip(norm / 4).item() == norm
    assert gradients.norm().item() == pytest.approx(norm / 4, rel=1e-4)


def test_finished_gradients_live_in_the_buckets_only_and_clear_empties_them():
    model = make("fp32")
    gradients = ready(model)
    losses = model(*batch())
    (losses.cross_entropy + losses.balance).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(b.gradients.abs().sum() > 0 for b in gradients.buckets)
    gradients.clear()
    assert all((b.gradients == 0).all() for b in gradients.buckets)


def test_microbatches_of_a_bf16_model_add_up_in_fp32():
    model = make("bf16", replace(MODEL, moe=replace(MODEL.moe, aux_loss=0.0)))
    gradients = ready(model)
    (bucket, *_) = [b for b in gradients.buckets if any(p.name == "head.norm.weight" for p in b.parameters)]
    parameter = dict(model.named_parameters())["head.norm.weight"]
    for _ in range(300):  # 256 + 1 is 256 in bf16
        parameter.sum().backward()
    view = next(v for p, v in bucket.views(bucket.gradients) if p.name == "head.norm.weight")
    assert (view == 300).all()
