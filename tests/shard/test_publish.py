"""Updated shares reach every replica before anybody uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.comm import byte_counters
from moefold.config.run import AttentionConfig, LoraConfig, ModelConfig, MoeConfig, OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.dtypes import DTYPES
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.experts import Experts
from moefold.model.transformer import Transformer
from moefold.optim.optimizer import build_optimizer
from moefold.shard.buckets import Bucket, fill_buckets
from moefold.shard.publish import Publisher
from moefold.train.assemble import assemble_run, default_dtype
from moefold.train.parity import random_corpus
from tests.support.models import transformer
from tests.support.ranks import run_ranks
from tests.train.test_lora_runs import LORA, ROUTED, config_of, random_adapters

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=32,
    dense_ffn=16,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=4, qk_norm="full", qkv_bias=True),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, shared_ffn=8, dense_layers=1),
)
LENGTH, SMALL = 8, 100  # a parameter or two in a bucket


def make(world: World, dtype: str, most: int = SMALL) -> tuple[Transformer, list[Bucket], Publisher]:
    with default_dtype(DTYPES[dtype]):
        model = transformer(MODEL, LENGTH, BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16)), world)
    initialise_parameters(model, seed=1)
    buckets = fill_buckets(model, world, most)
    return model, buckets, Publisher(model, buckets)


def stepped(
    world: World, dtype: str, most: int
) -> tuple[dict[str, tuple[Any, torch.Tensor]], dict[str, int], list[int]]:
    """A step of random gradients, the same wherever a parameter is held; weights by name with their place."""
    model, buckets, publisher = make(world, dtype, most)
    optimizer = build_optimizer(buckets, OptimConfig(), BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16)))
    for bucket in buckets:
        for parameter, view in bucket.parameter_views(bucket.gradients):
            seed = sum(map(ord, parameter.name))
            whole = torch.randn(parameter.declaration.shape, generator=torch.Generator().manual_seed(seed))
            view.copy_(whole[tuple(slice(start, start + size) for start, size in parameter.part)])
    optimizer.step(1, 0.1)
    with byte_counters.counted_bytes_sent() as sent:
        publisher.publish()
    publisher.await_all_buckets()
    assert not publisher.under_way
    bytes_ = {axis: n for (what, axis), n in sent.items() if what == "publish"}
    expected: dict[str, int] = {}
    for bucket in buckets:
        d = bucket.replicas.size
        expected[bucket.replicas.name] = expected.get(bucket.replicas.name, 0) + bucket.weights.nbytes * (d - 1) // d
    assert bytes_ == {axis: n for axis, n in expected.items() if n}
    return {p.name: (p.part, p.tensor.detach().clone()) for p in declared_parameters(model)}, bytes_, [len(buckets)]


@pytest.mark.parametrize("most", [SMALL, 1 << 25])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "ep": 2, "etp": 2}], ids=["dp 4", "dp 2 tp 2 ep 2 etp 2"])
def test_after_publishing_every_rank_has_the_weights_of_one_rank_to_the_bit(parallel, dtype: str, most: int):
    expected, nothing, _ = stepped(single_rank_world(), dtype, most)
    assert nothing == {}, "alone, nothing is sent"
    for weights, sent, _ in run_ranks(stepped, 4, dtype, most, **parallel):
        assert sent
        assert weights.keys() == expected.keys()
        for name, (part, value) in weights.items():
            place = tuple(slice(start, start + size) for start, size in part)
            assert torch.equal(value, expected[name][1][place]), name


class Pending:
    """Work that is done only when somebody waits for it: the tensor is wrong until then."""

    def __init__(self, bucket: Bucket):
        self.bucket, self.right = bucket, bucket.weights.clone()
        bucket.weights.fill_(float("nan"))

    def wait(self) -> None:
        self.bucket.weights.copy_(self.right)


def late(publisher: Publisher) -> None:
    """Every bucket is still travelling."""
    for number, bucket in enumerate(publisher.buckets):
        publisher.under_way[number] = Pending(bucket)  # pyright: ignore[reportArgumentType]


def tokens() -> torch.Tensor:
    return torch.arange(2 * LENGTH).view(2, LENGTH)


USES = {
    "forward": lambda model: model(tokens(), tokens()).cross_entropy,
    "logits": lambda model: model.logits(tokens()),
    "state_dict": lambda model: torch.cat([x.flatten().float() for x in model.state_dict().values()]),
}


@torch.no_grad()
def use_late_weights(world: World, use: str) -> tuple[bool, int]:
    """Whether late weights give what weights in time do, and how many gathers are left."""
    model, _, publisher = make(world, "fp32")
    expected = USES[use](model)
    late(publisher)
    return torch.equal(USES[use](model), expected), len(publisher.under_way)


@pytest.mark.parametrize("use", USES)
def test_no_weight_is_used_before_its_gather_is_complete(use: str):
    assert run_ranks(use_late_weights, 2, use) == [(True, 0), (True, 0)]


RUNS = {
    "latent attention, layers ahead": ("deepseek-v3", LoraConfig()),
    "sinks and biases": ("gpt-oss-20b", LoraConfig()),
    "latent experts": ("latent-30b-a3b", LoraConfig()),
    "adapters": ("deepseek-v3", LORA),
    "adapters of experts and the router": ("deepseek-v3", replace(LORA, targets=ROUTED)),
    "adapters with magnitudes": ("deepseek-v3", replace(LORA, dora=True)),
}


@torch.no_grad()
def compute_with_late_weights(world: World, preset: str, lora: LoraConfig) -> tuple[bool, int, int]:
    """As above, and how many buckets of experts are late where their kernel begins, which may be a fused one."""
    config = config_of(preset, world.size, lora=lora)
    run = assemble_run(config, world, Path("."), corpus=random_corpus(config))
    random_adapters(run)
    publisher = run.parameters
    assert isinstance(publisher, Publisher)
    expected = USES["forward"](run.model)
    late(publisher)
    left: list[int] = []

    def begin_kernel(kernel: Callable[..., torch.Tensor], read: list[int], *given: Any) -> torch.Tensor:
        left.extend(number for number in read if number in publisher.under_way)
        return kernel(*given)

    for module in run.model.modules():
        if isinstance(module, Experts):
            read = publisher.awaited_buckets(module.parameters())
            observed = partial(begin_kernel, module.expert_mlp, read)
            module.expert_mlp = observed  # pyright: ignore[reportAttributeAccessIssue]
    return torch.equal(USES["forward"](run.model), expected), len(publisher.under_way), len(left)


@pytest.mark.parametrize("name", RUNS)
def test_no_weight_of_a_run_is_used_before_its_gather_is_complete(name: str):
    """Adapters among them, whose matrices products read without a call of the adapter."""
    assert run_ranks(compute_with_late_weights, 2, *RUNS[name]) == [(True, 0, 0)] * 2


def test_one_replica_waits_for_nothing():
    model, _, _ = make(single_rank_world(), "fp32")
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def wait_for_the_embedding(world: World) -> None:
    model, buckets, publisher = make(world, "fp32")
    late(publisher)
    model.embedding(torch.arange(8))
    (own,) = [i for i, b in enumerate(buckets) if any(p.name == "embedding.weight" for p in b.parameters)]
    assert set(publisher.under_way) == set(range(len(buckets))) - {own}


def test_a_module_waits_for_its_own_weights_only():
    run_ranks(wait_for_the_embedding, 2)
