"""Inverse norms are those of torch in fp64, for matrices of any size, and at most that of the least norm."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.optimizer.matrix_norms_triton import SQUARES, SUMS, inverse_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("columns", [1, 100, SQUARES + 1, SQUARES * (SUMS + 1) // 3])
def test_norms_are_those_of_fp64(columns: int):
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(2, 3, columns, generator=generator).bfloat16().to(DEVICE)
    expected = 1 / x.double().norm(dim=(1, 2))
    torch.testing.assert_close(inverse_norms(x, 1e-7).double(), expected, rtol=1e-5, atol=0.0)


def test_a_matrix_of_zeros_has_the_inverse_of_the_least_norm():
    x = torch.zeros(1, 3, 4, dtype=torch.bfloat16, device=DEVICE)
    assert inverse_norms(x, 0.5).tolist() == [2.0]
