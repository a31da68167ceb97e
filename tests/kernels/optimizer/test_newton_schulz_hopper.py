"""Products of Newton-Schulz on Hopper: those of fp64 but for rounding, whatever lies above the diagonal or beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moefold.kernels.optimizer.gram_steps import PlainProducts, WholeForm, orthogonalise
from moefold.kernels.optimizer.newton_schulz import LEAST_NORM, newton_schulz_coefficients, newton_schulz_gram
from moefold.kernels.optimizer.newton_schulz_hopper import HopperProducts, ProductEnd, launch_symmetric_product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
TILE = 128
SIZES = [(7, 96, 24), (140, 128, 128), (5, 200, 264), (2, 640, 640), (3, 768, 2048), (3, 1000, 1000)]
SHAPES = [
    (3, 96, 200),
    (3, 200, 96),
    (2, 768, 2048),
    (2, 2048, 768),
    (1, 37, 20),  # with zeros behind it the longer side must stay the longer one
    (2, 24, 30),
    (2, 24, 99),
]
STEP = (3.4, -4.7, 2.0)


def drawn(count: int, rows: int, depth: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(rows + depth)
    values = torch.randn(count, rows, depth, generator=generator, device=DEVICE)
    return (values / depth**0.5).half()


def above_diagonal(rows: int) -> Tensor:
    """Where tiles above the diagonal lie."""
    tile = torch.arange(rows, device=DEVICE) // TILE
    return tile[:, None] < tile[None, :]


def without_upper_tiles(x_NRR: Tensor) -> Tensor:
    return x_NRR.masked_fill(above_diagonal(x_NRR.shape[1]), float("nan"))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Of the tiles on and below the diagonal."""
    difference = (found.double() - exact).masked_fill(above_diagonal(exact.shape[1]), 0.0)
    return (difference.abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize(("count", "rows", "depth"), SIZES)
@pytest.mark.parametrize("form", ["rows", "columns"])
def test_a_gram_matrix_is_that_of_fp64_alone_or_among_others(count: int, rows: int, depth: int, form: str):
    x = drawn(count, rows, depth)
    exact = x.double() @ x.double().mT
    operand = x if form == "rows" else x.mT.contiguous()
    found = [torch.full_like(exact, float("nan"), dtype=torch.float16) for _ in range(3)]
    launch_symmetric_product(operand, operand, found[0], form, ProductEnd(mirrors=True))
    assert relative_error(found[0], exact) < 6e-4
    assert torch.equal(found[0], found[0].mT)
    launch_symmetric_product(operand, operand.clone(), found[1], form, ProductEnd(mirrors=True))
    assert torch.equal(found[0], found[1]), "rows of a tile on the diagonal read once or twice"
    last = operand[-1:]
    launch_symmetric_product(last, last, found[2][-1:], form, ProductEnd(mirrors=True))
    assert torch.equal(found[0][-1], found[2][-1])


@pytest.mark.parametrize(("count", "rows"), [(1, 8), (7, 96), (140, 128), (5, 200), (3, 640), (2, 768), (3, 1000)])
def test_products_read_no_tile_above_the_diagonal(count: int, rows: int):
    x = drawn(count, rows, 2 * rows).double()
    a = (x @ x.mT).half()
    b = (a.double() @ a.double() / 2).half()
    b = b.tril() + b.tril(-1).mT
    products = HopperProducts(DEVICE)
    lower_a, lower_b = without_upper_tiles(a), without_upper_tiles(b)
    assert relative_error(products.product(lower_a, lower_b), a.double() @ b.double()) < 1e-3
    c, p, q = STEP
    exact = q * (a.double() @ a.double()) + p * a.double() + c * torch.eye(rows, device=DEVICE)
    assert relative_error(products.factor(lower_a, STEP), exact) < 1e-3
    scales = torch.linspace(0.5, 3.0, count, device=DEVICE)
    whole = products.product(lower_a, lower_b, WholeForm(torch.bfloat16, scales))
    assert torch.equal(whole, whole.mT)
    exact = scales.double()[:, None, None] * (a.double() @ b.double())
    assert relative_error(whole, exact) < 5e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
def test_newton_schulz_is_that_of_plain_products_and_the_same_in_two_runs(shape: tuple[int, int, int], name: str):
    x = drawn(*shape).bfloat16()
    coefficients = newton_schulz_coefficients(name, 5)
    found = newton_schulz_gram(x, coefficients)
    expected = orthogonalise(x, coefficients, LEAST_NORM, PlainProducts())
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    assert difference < 0.02
    assert torch.equal(found, newton_schulz_gram(x, coefficients))
    assert torch.equal(found[-1:], newton_schulz_gram(x[-1:], coefficients))
    if len(x) > 1:
        x[1] = float("nan")
        assert torch.equal(found[:1], newton_schulz_gram(x, coefficients)[:1])
