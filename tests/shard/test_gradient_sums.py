"""Gradients side by side: nothing of what memory held before is ever seen."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from moefold.layout.axes import World, single_rank_world
from moefold.layout.gradient_sink import memory_for_gradient, running_gradient_sum
from moefold.plan.memory.resident import STATE_ELEMENT_BYTES
from moefold.shard.buckets import fill_buckets
from moefold.shard.gradient_sums import GRADIENT_SUMS, BlockSums, GradientSums, StandingSums
from moefold.shard.gradients import GRADIENT_REDUCTIONS, Gradients
from tests.shard.test_gradients import make
from tests.support.ranks import run_ranks


@pytest.fixture
def dirty(monkeypatch: pytest.MonkeyPatch):
    """Memory without values is full of NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))


def sums(dtype: torch.dtype = torch.float32) -> GradientSums:
    return GradientSums([(0, 6), (8, 12), (12, 15)], 20, torch.device("cpu"), dtype)


def test_the_first_gradient_is_written_the_next_is_added_and_what_got_none_is_zero(dirty: None):
    made = sums()
    made.add(0, torch.ones(2, 3))
    made.add(2, torch.full((3,), 5.0))
    made.add(0, torch.full((2, 3), 2.0))
    assert made.whole().tolist() == [3.0] * 6 + [0.0] * 6 + [5.0] * 3 + [0.0] * 5
    made.add(1, torch.ones(4))
    assert made.whole()[8:12].tolist() == [1.0] * 4
    made.release()
    assert made.flat is None
    assert not made.whole().any()


def test_a_place_is_lent_once_while_nothing_is_there_and_only_in_the_type_of_the_sum():
    made = sums()
    assert made.lend_gradient_memory(0, torch.bfloat16) is None
    place = made.lend_gradient_memory(0, torch.float32)
    assert place is not None
    assert made.lend_gradient_memory(0, torch.float32) is None, "another use of the weight"
    place.fill_(4.0)
    made.add(0, place.view(2, 3))
    assert made.whole()[:6].tolist() == [4.0] * 6, "it is there, and not added to itself"
    made.add(1, torch.ones(4))
    assert made.lend_gradient_memory(1, torch.float32) is None, "a second microbatch adds"
    made.release()
    assert made.lend_gradient_memory(0, torch.float32) is not None


def test_a_gradient_that_was_moved_after_its_place_was_lent_is_written_all_the_same():
    made = sums()
    place = made.lend_gradient_memory(1, torch.float32)
    assert place is not None
    made.add(1, torch.full((4,), 2.0))
    assert made.whole()[8:12].tolist() == [2.0] * 4


class InPlace(torch.autograd.Function):
    """A product whose weight gradient is written where it belongs."""

    seen: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        out = memory_for_gradient(weight)
        InPlace.seen.append(out.data_ptr())
        return gradients[0] @ weight, torch.mm(gradients[0].T, x, out=out)


@pytest.mark.parametrize("uses", [1, 2])
def test_what_a_kernel_writes_in_its_place_is_found_there_by_autograd_and_counted_once(uses: int):
    model = make("bf16")
    buckets = fill_buckets(model, single_rank_world(), gradients="bf16")
    gradients = Gradients(buckets, single_rank_world())
    weight = model.head.weight
    x = torch.randn(5, weight.shape[1]).to(torch.bfloat16)
    gradients.begin()
    InPlace.seen.clear()
    sum(InPlace.apply(x, weight).sum() for _ in range(uses)).backward()  # pyright: ignore[reportAttributeAccessIssue]
    bucket = buckets[gradients.number_of["head.weight"]]
    view = next(v for p, v in bucket.parameter_views(bucket.gradients) if p.name == "head.weight")
    assert view.data_ptr() in InPlace.seen
    assert len(set(InPlace.seen)) == uses, "each use has memory of its own"
    torch.testing.assert_close(view.float(), (uses * x.float().sum(0)).expand_as(view), rtol=1e-2, atol=1e-2)


def test_bf16_gradients_take_two_bytes_and_no_memory_between_steps():
    model = make("bf16")
    buckets = fill_buckets(model, single_rank_world(), gradients="bf16")
    gradients = Gradients(buckets, single_rank_world())
    gradients.begin()
    assert all(bucket.sums.flat is None for bucket in buckets)
    tokens = torch.zeros(1, 6, dtype=torch.long)
    model(tokens, tokens).cross_entropy.backward()
    assert all(bucket.gradients.dtype == torch.bfloat16 for bucket in buckets)
    gradients.begin()
    assert all(bucket.sums.flat is None for bucket in buckets)


BLOCK_TYPES = {"fp16": (2, 1e-3), "fp8": (1, 0.07), "int8": (1, 0.035)}  # bytes of a code, error of large values


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_sums_in_blocks_are_those_of_fp32_within_the_types_resolution(name: str, dirty: None):
    size, bound = BLOCK_TYPES[name]
    spans = [(0, 300), (384, 500), (512, 600)]
    made, exact = (
        BlockSums(spans, 640, torch.device("cpu"), name),
        GradientSums(spans, 640, torch.device("cpu"), torch.float32),
    )
    for number, seed in ((0, 1), (2, 2), (0, 3), (0, 4)):
        start, end = spans[number]
        gradient = torch.randn(end - start, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        made.add(number, gradient)
        exact.add(number, gradient)
        assert made.lend_gradient_memory(number, torch.float32) is None
        assert made.running_sum(number) is None
    found, right = made.whole(), exact.whole()
    largest = right.view(-1, 128).abs().amax(1).repeat_interleave(128)
    assert ((found - right).abs() <= 2 * bound * largest).all()
    assert not found[384:512].any()
    assert torch.equal(made.place(0), found[:300])
    assert made.nbytes == made.held_bytes == size * 640 + 4 * 5
    made.keep(2, torch.full((88,), math.nan))
    assert made.place(2).isnan().all()
    assert torch.equal(made.place(0), found[:300])
    made.release()
    assert made.held_bytes == 0
    assert not made.whole().any()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_steps_of_gradients_in_blocks_have_a_norm_near_fp32_and_the_bytes_of_the_plan(name: str):
    tokens = torch.arange(24).view(4, 6) % 16
    norms: list[float] = []
    for kept in ("fp32", name):
        model = make("bf16")
        buckets = fill_buckets(model, single_rank_world(), gradients=kept)
        gradients = Gradients(buckets, single_rank_world())
        gradients.begin()
        for row in tokens.split(2):
            model(row, row).cross_entropy.backward()
        gradients.finish(torch.tensor(24))
        gradients.note_moved()
        norms.append(gradients.norm().item())
        assert "head.weight" in gradients.moved
        elements = sum(len(bucket.weights) for bucket in buckets)
        assert gradients.bytes() == gradients.held_bytes() == STATE_ELEMENT_BYTES[kept] * elements
    right, found = norms
    assert found == pytest.approx(right, rel=0.01)


class AddsItself(torch.autograd.Function):
    """A product that adds its weight gradient to the sum that is there, and gives autograd none."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        d_weight, into = gradients[0].T @ x, running_gradient_sum(weight)
        if into is None:
            return gradients[0] @ weight, d_weight
        into.add_(d_weight)
        return gradients[0] @ weight, None


def test_a_product_may_add_to_the_sum_itself_and_the_bucket_leaves_when_it_is_the_last():
    model = make("bf16")
    gradients = Gradients(fill_buckets(model, single_rank_world(), most=1), single_rank_world())
    weight = model.head.weight
    x = torch.randn(5, weight.shape[1]).to(torch.bfloat16).requires_grad_()
    gradients.begin()
    number = gradients.number_of["head.weight"]
    for last in (False, False, True):
        gradients.expect_last_gradients({"head.weight"} if last else set())
        assert gradients.missing[number] == 1
        AddsItself.apply(x, weight).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert gradients.missing[number] == 0
    once = x.detach().float().sum(0).to(torch.bfloat16).float()  # what a bf16 product gives
    torch.testing.assert_close(gradients.buckets[number].gradients.view_as(weight), (3 * once).expand_as(weight))


def test_standing_memory_stays_where_it_is_and_forgets_what_it_held():
    made = StandingSums([(0, 6), (8, 12), (12, 15)], 20, torch.device("cpu"), torch.float32)
    address = made.whole().data_ptr()
    for step in (1.0, 2.0):
        made.release()
        made.standing.fill_(math.nan)  # an earlier step may have left anything
        made.add(0, torch.ones(2, 3))
        made.add(2, torch.full((3,), 5.0 * step))
        made.add(0, torch.full((2, 3), 2.0))
        assert made.lend_gradient_memory(1, torch.float32) is None
        assert made.running_sum(0) is None
        assert made.whole().tolist() == [3.0] * 6 + [0.0] * 6 + [5.0 * step] * 3 + [0.0] * 5
        assert made.whole().data_ptr() == made.place(0).data_ptr() == address


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_standing_and_fleeting_memory_hold_the_same_sums_to_the_bit(dtype: str):
    found = []
    for memory in ("fleeting", "standing"):
        model = make(dtype)
        gradients = Gradients(fill_buckets(model, single_rank_world(), memory=memory), single_rank_world())
        tokens = torch.arange(12).view(2, 6)
        for _ in range(2):  # the second step begins with what the first has left
            gradients.begin()
            for part in tokens.split(1):
                model(part, part).cross_entropy.backward()
        found.append([bucket.gradients.clone() for bucket in gradients.buckets])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def reduced_addresses(world: World, reduction: str) -> dict[str, list[int]]:
    """Where the sum over ranks lies in three steps, with other memory allocated in between."""
    reduce = GRADIENT_REDUCTIONS[reduction]
    found: dict[str, list[int]] = {}
    kept = []
    for memory in ("fleeting", "standing"):
        made = GRADIENT_SUMS[memory]([(0, 64)], 64, world.device, torch.float32)
        for _ in range(3):
            made.release()
            made.add(0, torch.ones(64))
            share = reduce(made.whole(), world.everyone, made.memory_for_reduction).arrived()
            assert torch.equal(share, torch.full((32,), 2.0))
            found.setdefault(memory, []).append(share.data_ptr())
            kept.append(share)  # fleeting memory of a later step lies elsewhere
    return found


@pytest.mark.parametrize("reduction", ["fp32", "bf16"])
def test_the_sum_over_ranks_stays_where_it_is_in_standing_memory(reduction: str):
    for found in run_ranks(reduced_addresses, 2, reduction):
        assert len(set(found["standing"])) == 1
        assert len(set(found["fleeting"])) == 3
