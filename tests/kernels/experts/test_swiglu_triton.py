"""The gated activation in Triton, in its interpreter where there is no GPU, against the reference, both ways."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.experts import swiglu_triton
from moefold.kernels.experts.swiglu import swiglu
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("number", range(9))
def test_it_equals_the_reference_forward_and_backward(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(swiglu_triton, "BLOCK", 128)  # so that a row takes several
    case = swiglu.cases(DEVICE, torch.float32)[number]
    check(swiglu, swiglu.implementations["triton"], case, "fp32")
