"""Attention's backward for Hopper: its gradients are those of an fp32 reference, to the bit the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.attention import backward_parts, workspace
from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.backward_hopper_launch import (
    hopper_backward_applies,
    hopper_plan,
    launch_hopper_backward,
    softmax_statistics,
)
from moefold.kernels.attention.backward_parts import plan_backward
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward
from moefold.kernels.attention.workspace import kv_heads_at_once, score_gradient_rows

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.1
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k, v

# B, S, H, G, D, V: one position, ends within and at a block, one block more than pairs, groups of 1, 2, 3, 4 and 8.
SHAPES = [
    (1, 1, 1, 1, 128, 128),
    (2, 128, 2, 2, 128, 128),
    (2, 300, 4, 1, 128, 128),
    (1, 640, 8, 8, 64, 64),
    (3, 129, 6, 2, 64, 64),
    (2, 1000, 16, 2, 128, 128),
    (1, 2049, 4, 2, 128, 128),
    (1, 1, 1, 1, 192, 128),
    (2, 300, 4, 2, 192, 128),
    (1, 1000, 6, 6, 192, 128),
    (1, 2112, 8, 2, 192, 128),
]


class Inputs(NamedTuple):
    """(B, S, heads, D) each; dy is the gradient of the result."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dy: torch.Tensor


def inputs(b: int, s: int, h: int, g: int, d: int, v: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    generator = torch.Generator().manual_seed(s)
    heads = ((h, d), (g, d), (g, v), (h, v))
    return Inputs(*(torch.randn(b, s, *one, generator=generator).to(DEVICE, dtype) for one in heads))


def forward(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp."""
    q, k, v = (one.transpose(1, 2) for one in (x.q, x.k, x.v))
    y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=SCALE
    )  # fmt: skip
    return y.transpose(1, 2), lse.view(q.shape[:3])


def backward(x: Inputs) -> Gradients:
    return hopper_backward(x.dy, x.q, x.k, x.v, *forward(x), SCALE)


def hopper_backward(dy, q, k, v, y, lse: torch.Tensor, scale: float) -> Gradients:
    statistics = softmax_statistics(y, dy, lse, scale)
    return launch_hopper_backward(dy, q, k, v, statistics, scale)


def expected(x: Inputs) -> Gradients:
    leaves = [one.float().requires_grad_() for one in (x.q, x.k, x.v)]
    return torch.autograd.grad(attention.reference(*leaves, SCALE), leaves, x.dy.float())  # pyright: ignore[reportReturnType]


def same_bits(a: Gradients, b: Gradients) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def all_close(found: Gradients, wanted: Gradients) -> None:
    """Within what rounding P, dS and results to 16 bits does: 0.3 % of each gradient as a whole."""
    for a, b, name in zip(found, wanted, ("dq", "dk", "dv"), strict=True):
        off = (a.float() - b).norm().item()
        assert off <= 4e-3 * b.norm().item() + 1e-2, f"{name} is {off:.2e} off of {b.norm().item():.2e}"


def test_nothing_but_a_hopper_card_is_asked_for():
    x = inputs(1, 64, 2, 1, 128, 128)
    assert hopper_backward_applies(x.q, x.k, x.v, SCALE) == HOPPER
    assert not hopper_backward_applies(x.q.float(), x.k.float(), x.v.float(), SCALE)
    assert not hopper_backward_applies(x.q[..., :32], x.k[..., :32], x.v[..., :32], SCALE)
    assert not hopper_backward_applies(x.q, x.k, x.v[..., :64], SCALE)
    latent = inputs(1, 64, 2, 1, 192, 128)
    assert hopper_backward_applies(latent.q, latent.k, latent.v, SCALE) == HOPPER


@pytest.mark.parametrize("s", [1, 64, 70, 128])
def test_statistics_say_of_queries_behind_the_end_that_they_see_nothing(s: int):
    x = inputs(2, s, 3, 3, 16, 16, torch.float32)
    lse = torch.randn(2, 3, s, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    minus_lse, minus_delta = (
        softmax_statistics(x.q, x.dy, lse, 0.5).view(2, 3, 2, 2, 64).transpose(2, 3).flatten(3).unbind(2)
    )
    assert torch.equal(minus_lse[..., :s], -lse / 0.5)
    assert torch.all(minus_lse[..., s:] == -torch.inf)
    torch.testing.assert_close(minus_delta[..., :s], -(x.q * x.dy).sum(-1).transpose(1, 2))
    assert torch.all(minus_delta[..., s:] == 0)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_reference_in_fp32(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype):
    x = inputs(*shape, dtype=dtype)
    all_close(backward(x), expected(x))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_six_runs_agree_to_the_bit(shape: tuple[int, int, int, int, int, int]):
    x = inputs(*shape)
    y, lse = forward(x)
    first, *others = (hopper_backward(x.dy, x.q, x.k, x.v, y, lse, SCALE) for _ in range(6))
    assert all(same_bits(first, other) for other in others)


@pytest.mark.gpu
@on_hopper
def test_heads_that_go_one_after_the_other_give_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    x = inputs(3, 300, 8, 4, 192, 128)
    at_once = backward(x)
    monkeypatch.setattr(workspace, "MOST_BYTES", 5 * 2 * score_gradient_rows(300) * 128)
    assert kv_heads_at_once(300, 12, 2) == 4
    plan_backward.cache_clear()
    one_after_the_other = backward(x)
    plan_backward.cache_clear()
    assert same_bits(at_once, one_after_the_other)


IN_PARTS = [(2, 1024, 8, 2, 128, 128), (1, 1200, 6, 6, 64, 64), (1, 2049, 8, 1, 128, 128)]


@pytest.fixture(params=[0.9, 0.2, 0.06], ids=lambda share: f"room for {share} of a head's scores")
def room_share(request: pytest.FixtureRequest) -> float:
    return request.param


@pytest.fixture(params=[True, False], ids=["causal", "all keys"])
def causal(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=IN_PARTS, ids=str)
def shape_in_parts(
    request: pytest.FixtureRequest, room_share: float, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """As with sequences whose scores do not fit: 32,768 positions, eight query heads to a key/value head."""
    _, s, _, _, d, _ = request.param
    scores = 2 * score_gradient_rows(s, causal) * 64
    monkeypatch.setattr(workspace, "MOST_BYTES", 0)
    monkeypatch.setattr(backward_parts, "RANGE_BLOCKS", (2,))
    monkeypatch.setattr(backward_parts, "PARTS_BYTES", int(room_share * scores) + 2 * (s + 127) * d * 4)
    plan_backward.cache_clear()
    yield request.param
    plan_backward.cache_clear()


def test_little_room_leaves_several_parts(shape_in_parts: tuple[int, int, int, int, int, int], causal: bool):
    x = inputs(*shape_in_parts)
    plan = hopper_plan(x.q, x.k, x.v, causal)
    assert plan
    assert len(plan.parts) > 1


@pytest.mark.gpu
@on_hopper
def test_a_sequence_in_parts_has_the_gradients_of_the_reference_every_time(
    shape_in_parts: tuple[int, int, int, int, int, int], causal: bool
):
    x = inputs(*shape_in_parts)
    _, s, _, _, _, _ = shape_in_parts
    ahead = (SCALE, 0 if causal else s, 0)
    wide = Inputs(*(one.float() for one in x))
    q, k, v, dy = wide
    out, lse = torch.zeros_like(dy), dy.new_full((len(q), q.shape[2], s), -torch.inf)
    attention_block.reference(out, lse, q, k, v, *ahead, None, fresh=True)

    def gradients(implementation: str, of: Inputs) -> Gradients:
        sums = torch.full_like(q, torch.nan), torch.zeros_like(k), torch.zeros_like(v)
        add = attention_block_backward.implementations[implementation]
        add(*sums, torch.empty_like(lse), of.dy, of.q, of.k, of.v, out.to(of.dy.dtype), lse, *ahead, None, fresh=True)
        return sums

    first, *others = (gradients("hopper", x) for _ in range(3))
    all_close(first, gradients("reference", wide))
    assert all(same_bits(first, other) for other in others)


@pytest.mark.gpu
@on_hopper
def test_heads_may_lie_anywhere():
    x = inputs(2, 200, 4, 2, 64, 64)
    y, lse = forward(x)
    wanted = hopper_backward(x.dy, x.q, x.k, x.v, y, lse, SCALE)
    q, k, v = torch.cat((x.q, x.k, x.v), dim=2).split([4, 2, 2], dim=2)  # as one product gives them
    assert same_bits(wanted, hopper_backward(x.dy, q, k, v, y, lse, SCALE))
    q, k, v, dy = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in x)
    assert same_bits(wanted, hopper_backward(dy, q, k, v, y, lse, SCALE))
    q, k, v, dy = (torch.nn.functional.pad(one.flatten(2), (1, 0))[..., 1:].view(one.shape) for one in x)
    assert same_bits(wanted, hopper_backward(dy, q, k, v, y, lse, SCALE))


@pytest.mark.gpu
@on_hopper
def test_a_captured_backward_waits_for_nothing_and_replays_right_with_other_numbers():
    x = inputs(1, 500, 4, 2, 128, 128)
    y, lse = forward(x)
    run = partial(hopper_backward, x.dy, x.q, x.k, x.v, y, lse, SCALE)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for one in x:
        one.copy_(one.flip(1) * 0.7)
    for kept, new in zip((y, lse), forward(x), strict=True):
        kept.copy_(new)
    graph.replay()
    all_close(found, expected(x))
