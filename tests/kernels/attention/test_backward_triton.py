"""Attention's backward without atomics against autograd through the reference, by Triton's interpreter where there is
no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.attention import backward_triton
from moefold.kernels.attention.attention import attention, attention_mask, heads_first

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3


def inputs(b: int, s: int, h: int, g: int, d: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(s)
    return tuple(torch.randn(b, s, n, d, generator=generator).to(DEVICE) for n in (h, g, g, h))


def log_sums(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    queries, keys, _ = heads_first(q, k, k, torch.float32)
    scores = queries @ keys.transpose(-1, -2) * SCALE
    return scores.masked_fill(~attention_mask(q.shape[1], k.shape[1], 0, 0, q.device), -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("tile", [(16, 16, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)])
@pytest.mark.parametrize("shape", [(2, 33, 4, 2, 16), (1, 130, 2, 1, 32), (1, 64, 3, 3, 16), (1, 1, 1, 1, 16)])
def test_gradients_equal_those_of_the_reference(
    shape: tuple[int, ...], tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """Ends within a tile, at one, groups of query heads, and tiles that the diagonal crosses off their corners."""
    monkeypatch.setattr(backward_triton, "TILE", tile)
    q, k, v, dy = inputs(*shape)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attention.reference(*leaves, SCALE)
    expected = torch.autograd.grad(y, leaves, dy)
    found = backward_triton.attention_backward(dy, q, k, v, y.detach(), log_sums(q, k), SCALE)
    for a, b, name in zip(found, expected, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_values_may_be_narrower_than_keys():
    q, k, _, _ = inputs(1, 40, 4, 2, 24)
    _, _, v, dy = inputs(1, 40, 4, 2, 16)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attention.reference(*leaves, SCALE)
    found = backward_triton.attention_backward(dy, q, k, v, y.detach(), log_sums(q, k), SCALE)
    torch.testing.assert_close(found, torch.autograd.grad(y, leaves, dy), rtol=1e-4, atol=1e-5)


def test_heads_may_lie_anywhere_as_long_as_each_is_in_one_piece():
    q, k, v, dy = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(1, 40, 2, 1, 16))
    y, lse = attention.reference(q, k, v, SCALE), log_sums(q, k)
    apart = backward_triton.attention_backward(dy, q, k, v, y, lse, SCALE)
    close = backward_triton.attention_backward(*(x.contiguous() for x in (dy, q, k, v, y)), lse, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(apart, close, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_ten_backward_passes_agree_to_the_bit():
    q, k, v, dy = (x.bfloat16().requires_grad_() for x in inputs(2, 1000, 8, 2, 128))
    first, *others = (
        torch.autograd.grad(attention.implementations["deterministic"](q, k, v), (q, k, v), dy) for _ in range(10)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_latent_heads_have_the_gradients_of_the_reference_and_ten_passes_agree_to_the_bit():
    """Keys of 192 and values of 128."""
    q, k, _, _ = (x.bfloat16().requires_grad_() for x in inputs(2, 1000, 4, 4, 192))
    _, _, v, dy = (x.bfloat16().requires_grad_() for x in inputs(2, 1000, 4, 4, 128))
    first, *others = (
        torch.autograd.grad(attention.implementations["deterministic"](q, k, v), (q, k, v), dy) for _ in range(10)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention.reference(*leaves), leaves, dy.float())
    for a, b, name in zip(first, expected, ("dq", "dk", "dv"), strict=True):
        assert (a.float() - b).norm() <= 4e-3 * b.norm() + 1e-2, name
