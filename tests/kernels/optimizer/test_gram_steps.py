"""Newton-Schulz in Gram form: nearer to exact numbers than bf16 steps, and free of the batch."""

from __future__ import annotations

import pytest
import torch

from moefold.kernels.optimizer import gram_steps
from moefold.kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_coefficients, newton_schulz_gram

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POLAR = newton_schulz_coefficients("polar_express", 5)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).bfloat16()


def decaying(rows: int, columns: int, seed: int) -> torch.Tensor:
    """One large singular value, the others down to a thousandth."""
    left = torch.linalg.qr(gaussian(rows, rows, seed=seed).double())[0]
    right = torch.linalg.qr(gaussian(columns, rows, seed=seed).double())[0]
    values = torch.logspace(0, -3, rows, dtype=torch.float64)
    return (left @ torch.diag(values) @ right.T).bfloat16()


DECAYING = torch.stack([decaying(24, 40, seed) for seed in range(8)])
MATRICES = {"wide": gaussian(4, 24, 96), "tall": gaussian(4, 37, 20), "decaying": DECAYING}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    difference = found.double() - exact
    return (difference.norm() / exact.norm()).item()


@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("kind", MATRICES)
def test_results_are_nearer_to_exact_numbers_than_those_of_bf16_steps(kind: str, name: str):
    x = MATRICES[kind].to(DEVICE)
    coefficients = newton_schulz_coefficients(name, 5)
    exact = newton_schulz(x.double(), coefficients)
    in_bf16 = error(newton_schulz(x, coefficients), exact)
    found = error(newton_schulz_gram(x, coefficients), exact)
    assert found < in_bf16, f"{found:.4f}, bf16 steps {in_bf16:.4f}"


def test_a_matrix_does_not_depend_on_the_matrices_beside_it_nor_on_how_many_are_worked_on_together(monkeypatch):
    x = gaussian(3, 16, 40).to(DEVICE)
    together = newton_schulz_gram(x, POLAR)
    alone = newton_schulz_gram(x[1:2], POLAR)
    assert torch.equal(together[1:2], alone)
    monkeypatch.setattr(gram_steps, "GRAM_ELEMENTS", 2 * 16**2)
    in_parts = newton_schulz_gram(x, POLAR)
    assert torch.equal(in_parts, together)


@pytest.mark.parametrize("steps", range(1, 8))
def test_any_number_of_steps_is_that_of_exact_numbers(steps: int):
    coefficients = newton_schulz_coefficients("quintic", steps)
    x = gaussian(2, 20, 33).to(DEVICE)
    exact = newton_schulz(x.double(), coefficients)
    assert error(newton_schulz_gram(x, coefficients), exact) < 0.01


def test_zeros_stay_zeros_and_no_matrix_is_no_result():
    zeros = torch.zeros(1, 3, 4, dtype=torch.bfloat16, device=DEVICE)
    assert newton_schulz_gram(zeros, POLAR).eq(0).all()
    assert newton_schulz_gram(zeros[:0], POLAR).shape == (0, 3, 4)


@pytest.mark.parametrize(("steps", "parts"), [(1, [1]), (2, [2]), (5, [2, 3]), (8, [2, 3, 3]), (9, [2, 3, 3, 1])])
def test_a_new_gram_matrix_is_taken_after_two_steps_and_then_after_each_three(steps: int, parts: list[int]):
    coefficients = newton_schulz_coefficients("quintic", steps)
    found = gram_steps.steps_by_gram(coefficients)
    assert [len(part) for part in found] == parts
