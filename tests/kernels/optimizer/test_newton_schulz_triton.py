"""Newton-Schulz in Gram form: nearer to exact numbers than bf16 steps, symmetric to the bit, and free of the batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.optimizer import newton_schulz_triton
from moefold.kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_coefficients, newton_schulz_gram
from tests.support.compiled import output_of_compiler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POLAR = newton_schulz_coefficients("polar_express", 5)


def gaussian(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().to(DEVICE)


def decaying(rows: int, columns: int) -> torch.Tensor:
    """One large singular value, the others down to a thousandth."""
    left = torch.linalg.qr(gaussian(rows, rows).double())[0]
    right = torch.linalg.qr(gaussian(columns, rows).double())[0]
    values = torch.logspace(0, -3, rows, dtype=torch.float64, device=DEVICE)
    return (left @ torch.diag(values) @ right.T).bfloat16()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    difference = found.double() - exact
    return (difference.norm() / exact.norm()).item()


@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("x", [gaussian(24, 96), gaussian(37, 20), decaying(24, 40)], ids=["wide", "tall", "decaying"])
def test_results_are_nearer_to_exact_numbers_than_those_of_bf16_steps(x: torch.Tensor, name: str):
    coefficients = newton_schulz_coefficients(name, 5)
    exact = newton_schulz(x[None].double(), coefficients)
    in_bf16 = error(newton_schulz(x[None], coefficients), exact)
    found = error(newton_schulz_gram(x[None], coefficients), exact)
    assert found < in_bf16, f"{found:.4f}, bf16 steps {in_bf16:.4f}"


@pytest.mark.extended
def test_a_matrix_does_not_depend_on_the_matrices_beside_it_nor_on_how_many_are_worked_on_together(monkeypatch):
    x = gaussian(3, 16, 40)
    together = newton_schulz_gram(x, POLAR)
    alone = newton_schulz_gram(x[1:2], POLAR)
    assert torch.equal(together[1:2], alone)
    monkeypatch.setattr(newton_schulz_triton, "GRAM_ELEMENTS", 2 * 16**2)
    in_parts = newton_schulz_gram(x, POLAR)
    assert torch.equal(in_parts, together)


def test_a_symmetric_product_of_several_tiles_is_symmetric_to_the_bit_and_right():
    rows = newton_schulz_triton.TILE + 10
    x = gaussian(1, rows, 64).half() / 64
    gram = newton_schulz_triton.symmetric_product(x, x)
    assert torch.equal(gram, gram.mT)
    exact = x.double() @ x.double().mT
    assert error(gram, exact) < 5e-4
    factor = newton_schulz_triton.step_factor(gram, POLAR[0])
    assert torch.equal(factor, factor.mT)


def test_zeros_stay_zeros_and_no_matrix_is_no_result():
    zeros = torch.zeros(1, 3, 4, dtype=torch.bfloat16, device=DEVICE)
    assert newton_schulz_gram(zeros, POLAR).eq(0).all()
    assert newton_schulz_gram(zeros[:0], POLAR).shape == (0, 3, 4)


@pytest.mark.parametrize(("steps", "parts"), [(1, [1]), (2, [2]), (5, [2, 3]), (8, [2, 3, 3]), (9, [2, 3, 3, 1])])
def test_a_new_gram_matrix_is_taken_after_two_steps_and_then_after_each_three(steps: int, parts: list[int]):
    coefficients = newton_schulz_coefficients("quintic", steps)
    found = newton_schulz_triton.steps_by_gram(coefficients)
    assert [len(part) for part in found] == parts


def test_the_kernels_compile_for_hopper_to_wgmma_and_tma():
    printed = output_of_compiler("compile_newton_schulz")
    products = [line for line in printed.splitlines() if "product" in line]
    assert len(products) == 3
    assert all("wgmma yes, TMA yes" in line for line in products), printed
