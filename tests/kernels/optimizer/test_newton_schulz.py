"""Newton-Schulz against singular value decompositions, against torch's own, and batched against one by one."""

from __future__ import annotations

import pytest
import torch

from moefold.anatomy.newton_schulz_flops import newton_schulz_flops
from moefold.kernels.optimizer.newton_schulz import (
    newton_schulz,
    newton_schulz_batched,
    newton_schulz_coefficients,
)

QUINTIC = newton_schulz_coefficients("quintic", 5)
SHAPES = [(24, 24), (24, 40), (40, 24), (8, 64)]


def gaussian(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def with_singular_values(values: torch.Tensor, columns: int) -> torch.Tensor:
    """A matrix with these singular values, before its division by its norm."""
    left = torch.linalg.qr(gaussian(len(values), len(values)))[0]
    right = torch.linalg.qr(gaussian(columns, len(values)))[0]
    return left @ torch.diag(values) @ right.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
def test_every_singular_value_is_mapped_by_the_polynomials_and_no_vector_turns(shape: tuple[int, int], name: str):
    coefficients = newton_schulz_coefficients(name, 5)
    x = gaussian(*shape)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    (found,) = newton_schulz(x[None], coefficients)
    torch.testing.assert_close(found, u @ torch.diag(s) @ vh, rtol=1e-9, atol=1e-9)


LIMITS = {"quintic": (0.65, 1.22), "polar_express": (0.86, 1.13)}  # of singular values that began at 0.01 or more


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIMITS)
def test_singular_values_are_near_one_after_five_steps(name: str, dtype: torch.dtype):
    values = torch.logspace(-2, 0, 32, dtype=torch.float64)
    x = with_singular_values(values, 96).to(dtype)
    (found,) = newton_schulz(x[None], newton_schulz_coefficients(name, 5))
    after = torch.linalg.svdvals(found.double())
    least, most = LIMITS[name]
    slack = 0.04 if dtype == torch.bfloat16 else 0.0
    assert least - slack < after.min()
    assert after.max() < most + slack
    exact = torch.linalg.svd(x.double(), full_matrices=False)
    nearest = exact.U @ exact.Vh
    cosine = (found.double() * nearest).sum() / found.double().norm() / nearest.norm()
    assert cosine > 0.98


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_torch_s_own_to_the_bit(shape: tuple[int, int]):
    muon = pytest.importorskip("torch.optim._muon")
    x = gaussian(*shape, dtype=torch.float32)
    expected = muon._zeropower_via_newtonschulz(x, QUINTIC[0], 5, 1e-7)
    (found,) = newton_schulz(x.bfloat16()[None], QUINTIC)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_matrix_does_not_depend_on_the_matrices_beside_it(shape: tuple[int, int], dtype: torch.dtype):
    x = gaussian(5, *shape, dtype=dtype)
    together = newton_schulz(x, QUINTIC)
    for i in range(5):
        assert torch.equal(newton_schulz(x[i : i + 1], QUINTIC)[0], together[i])
    torch.testing.assert_close(newton_schulz_batched(x, QUINTIC), together, rtol=1e-4, atol=1e-4)


def test_zeros_stay_zeros_and_no_matrix_is_no_result():
    assert newton_schulz(torch.zeros(2, 3, 4), QUINTIC).eq(0).all()
    assert newton_schulz(torch.zeros(0, 3, 4), QUINTIC).shape == (0, 3, 4)


def test_three_more_steps_of_polar_express_make_it_orthogonal():
    x = with_singular_values(torch.logspace(-2, 0, 32, dtype=torch.float64), 96)
    (found,) = newton_schulz(x[None], newton_schulz_coefficients("polar_express", 8))
    torch.testing.assert_close(found @ found.T, torch.eye(32, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_polynomials_of_polar_express_end_in_its_limit():
    ten = newton_schulz_coefficients("polar_express", 10)
    assert ten[7:] == ((1.875, -1.25, 0.375),) * 3
    assert sum(ten[-1]) == 1.0, "one stays one"


def test_operations_of_a_matrix():
    assert newton_schulz_flops(768, 2048, 5) == newton_schulz_flops(2048, 768, 5) == pytest.approx(28.7e9, rel=1e-3)
