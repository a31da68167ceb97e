"""Storage of weights: optimizer, publishing and checkpoints go through the contract, shown with a third storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moefold.checkpoint.live.logical_tensors import as_tensor_part, collect_tensors
from moefold.comm import byte_counters
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.layout.axes import World, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.dtypes import DTYPES
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.optim.optimizer import Optimizer, build_optimizer
from moefold.shard.buckets import Bucket, fill_buckets
from moefold.shard.publish import Publisher
from moefold.shard.storage import LargestOfReplicas, PlainWeights, SplitFp32Weights, StorageMaker, Wire, flat_part
from moefold.train.assemble import default_dtype
from tests.shard.test_publish import LENGTH, MODEL
from tests.support.models import transformer
from tests.support.ranks import run_ranks

SHARES = 2  # the most ranks that a bucket is cut over here


class Int8Weights:
    """Weights as int8 with one scale for each share: bytes on the wire, fp32 main weights, a float copy to compute."""

    def __init__(self, size: int, like: torch.Tensor):
        self.weights = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.codes = torch.zeros(size, dtype=torch.int8, device=like.device)
        self.scales = torch.zeros(SHARES, device=like.device)
        self.share, self.main = slice(0, 0), self.weights[:0].float()

    @property
    def number(self) -> int:
        """Which share this is."""
        return self.share.start // max(1, self.share.stop - self.share.start)

    def parameter_view(self, start: int, shape: Sequence[int]) -> torch.Tensor:
        return flat_part(self.weights, start, shape)

    def weights_of_share(self, share: slice) -> torch.Tensor:
        return self.weights[share]

    def open_main_weights(self, share: slice) -> None:
        self.share, self.main = share, self.weights[share].float()

    def main_values(self) -> torch.Tensor:
        return self.main

    def refresh_weights(self, values: torch.Tensor) -> None:
        self.main.copy_(values)
        self.scales[self.number] = self.main.abs().max() / 127
        self.codes[self.share] = (self.main / self.scales[self.number]).round().to(torch.int8)
        self.decode(self.share, self.number)

    def decode(self, share: slice, number: int) -> None:
        self.weights[share] = (self.codes[share] * self.scales[number]).to(self.weights.dtype)

    def fused_operands(self) -> None:
        return None

    def before_gather(self, agree: LargestOfReplicas) -> None: ...

    def wire_tensors(self, share: slice) -> list[Wire]:
        mine = self.scales[self.number : self.number + 1].clone()
        return [Wire(self.codes, self.codes[share].clone()), Wire(self.scales, mine)]

    def after_gather(self) -> None:
        size = len(self.weights) // SHARES
        for number in range(SHARES):
            self.decode(slice(number * size, (number + 1) * size), number)

    def logical_values(self) -> Any:
        return Int8Main(self, 0, len(self.main))

    def unheld_values(self) -> None:
        return None

    def main_weight_bytes(self) -> int:
        return self.main.nbytes

    def weight_bytes(self) -> int:
        return self.weights.nbytes + self.codes.nbytes


class Int8Main:
    """Main weights of an int8 storage: what is loaded is encoded at once."""

    dtype = torch.float32

    def __init__(self, storage: Int8Weights, first: int, last: int):
        self.storage, self.first, self.last = storage, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, window: slice) -> Int8Main:
        return Int8Main(self.storage, self.first + window.start, self.first + window.stop)

    def get(self, first: int, last: int) -> torch.Tensor:
        return self.storage.main[self.first + first : self.first + last]

    def put(self, first: int, last: int, values: torch.Tensor) -> None:
        self.get(first, last).copy_(values)
        self.storage.refresh_weights(self.storage.main)


def make(world: World, storage: StorageMaker, dtype: str = "bf16") -> tuple[Transformer, list[Bucket], Optimizer]:
    kernels = BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16, main="split"))
    with default_dtype(DTYPES[dtype]):
        model = transformer(MODEL, LENGTH, kernels, world)
    initialise_parameters(model, seed=1)
    buckets = fill_buckets(model, world, storage=storage)
    return model, buckets, build_optimizer(buckets, OptimConfig(), kernels)


def put_gradients(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        for parameter, view in bucket.parameter_views(bucket.gradients):
            seed = sum(map(ord, parameter.name))
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))


def updated(world: World) -> tuple[dict[str, torch.Tensor], int, int]:
    """Weights after a step and its publishing, bytes that were sent, and the elements of this rank's shares."""
    model, buckets, optimizer = make(world, Int8Weights)
    publisher = Publisher(model, buckets)
    put_gradients(buckets)
    optimizer.step(1, 0.05)
    with byte_counters.counted_bytes_sent() as sent:
        publisher.publish()
    publisher.await_all_buckets()
    for bucket in buckets:
        storage: Any = bucket.storage
        size = len(bucket.weights) // SHARES
        for number in range(SHARES):
            share = slice(number * size, (number + 1) * size)
            assert torch.equal(bucket.weights[share], (storage.codes[share] * storage.scales[number]).bfloat16())
    elements = sum(b.share.stop - b.share.start for b in buckets)
    weights = {p.name: p.tensor.detach().clone() for p in declared_parameters(model)}
    return weights, sum(n for (what, _), n in sent.items() if what == "publish"), elements + 4 * len(buckets)


def test_a_third_storage_is_updated_and_published_in_its_own_form():
    (one, sent, bytes_of_codes), (other, *_) = run_ranks(updated, 2)
    assert sent == bytes_of_codes, "a byte for each weight and one scale for each bucket"
    exact = make(single_rank_world(), PlainWeights)
    put_gradients(exact[1])
    exact[2].step(1, 0.05)
    for p in declared_parameters(exact[0]):
        assert torch.equal(one[p.name], other[p.name]), p.name
        off = (one[p.name].float() - p.tensor.float()).abs().max()
        assert off < 0.02, p.name  # half a step of 1/127 of the largest, in bf16


@pytest.mark.parametrize("storage", [PlainWeights, SplitFp32Weights, Int8Weights])
def test_a_checkpoint_reads_and_loads_fp32_main_weights_whatever_is_stored(storage: StorageMaker):
    model, buckets, optimizer = make(single_rank_world(), storage)
    tensors = collect_tensors(model, optimizer)
    for name, _ in model.named_parameters():
        part = as_tensor_part(tensors[f"optimizer.{name}.main"])
        assert part.dtype == torch.float32
        (held,) = part.held
        wanted = torch.randn(part.shape, generator=torch.Generator().manual_seed(len(name)))
        held.write(wanted)
        assert torch.equal(held.read(), wanted)
    for bucket in buckets:
        main = bucket.storage.main_values()
        if storage is SplitFp32Weights:
            assert torch.equal(bucket.weights, round_to_nearest(main, torch.bfloat16))
        elif storage is Int8Weights:
            step = main.abs().max() / 127
            assert (bucket.weights.float() - main).abs().max() < 0.6 * step + 0.02


@pytest.mark.parametrize("storage", [PlainWeights, SplitFp32Weights])
def test_a_rule_without_a_fused_kernel_gets_the_same_weights(storage: StorageMaker):
    """`main_values` and `refresh_weights` are what the fused operands are, in two passes."""
    one, two = (make(single_rank_world(), storage) for _ in range(2))
    for share in two[2].shares:
        share.storage.fused_operands = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    for _, buckets, optimizer in (one, two):
        put_gradients(buckets)
        optimizer.step(1, 0.05)
    for a, b in zip(one[1], two[1], strict=True):
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.storage.main_values(), b.storage.main_values())


def test_an_fp32_model_needs_no_main_weights():
    _, buckets, optimizer = make(single_rank_world(), PlainWeights, "fp32")
    assert optimizer.bytes()["main"] == 0
    assert all(bucket.storage.logical_values() is None for bucket in buckets)
