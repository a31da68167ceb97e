"""Turning heads in Triton, in its interpreter where there is no GPU, against the references, both ways."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.norm import rope_triton
from moefold.kernels.norm.rope import norm_rope, random_rope_angles, rope
from moefold.kernels.registry import CaseInputs
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("op", "cases"), [(rope, 4), (norm_rope, 4)], ids=["rope", "norm_rope"])
def test_both_equal_their_references_forward_and_backward(op, cases: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rope_triton, "WARPS", 5)  # fewer than tokens, so that each has several
    for case in op.cases(DEVICE, torch.float32)[:cases]:
        check(op, op.implementations["triton"], case, "fp32")


@pytest.mark.parametrize("size", [16, 48])
def test_heads_may_lie_as_attention_leaves_them(size: int):
    """Queries and their gradients come as views of other orders of dims."""
    x_BHSD, dy_BHSD = (torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    w, angles = torch.rand(size).to(DEVICE), random_rope_angles(CaseInputs(DEVICE, torch.float32), 5, 16)
    x, dy = (t.to(DEVICE).transpose(1, 2) for t in (x_BHSD, dy_BHSD))
    expected = norm_rope(x.contiguous(), w, angles, 1e-6)
    torch.testing.assert_close(rope_triton.rotate_heads(x, w, angles, 1e-6), expected, rtol=1e-5, atol=1e-5)
    straight = rope_triton.rotate_heads_backward(dy.contiguous(), x.contiguous(), w, angles, 1e-6)
    for a, b in zip(rope_triton.rotate_heads_backward(dy, x, w, angles, 1e-6), straight, strict=True):
        assert torch.equal(a, b)
