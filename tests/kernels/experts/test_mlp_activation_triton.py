"""The activations of MLPs in Triton, in its interpreter where there is no GPU, against the reference, both ways."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.experts import mlp_activation_triton
from moefold.kernels.experts.mlp_activation import mlp_activation
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = mlp_activation.cases("cpu", torch.float32)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)
def test_it_equals_the_reference_forward_and_backward(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mlp_activation_triton, "BLOCK", 128)  # so that a row takes several
    case = mlp_activation.cases(DEVICE, torch.float32)[number]
    check(mlp_activation, mlp_activation.implementations["triton"], case, "fp32")
