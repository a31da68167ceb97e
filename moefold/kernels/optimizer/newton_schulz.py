"""Newton-Schulz: the orthogonal matrix nearest to each matrix of a batch, by products alone.

    X = X / |X|                        Frobenius norm, so that singular values are at most one
    X = a X + (b A + c A A) X          A = X X^T; for each (a, b, c) of the coefficients

Each step maps every singular value s to a s + b s^3 + c s^5 and leaves the singular vectors as they are. Coefficients
are data: `newton_schulz_coefficients` has those of both published sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, repeat

import torch
from torch import Tensor

from moefold.kernels.linear.matmul import add_matmul, matmul
from moefold.kernels.optimizer.gram_steps import GramProducts, PlainProducts, orthogonalise
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

Coefficients = tuple[float, float, float]

LEAST_NORM = 1e-7  # matrices of a smaller norm are not scaled up to one
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)  # Jordan: steepest at zero; singular values end between 0.7 and 1.2

# Amsel, Persson, Musco, Gower, "The Polar Express": the best polynomial of each step in turn, for singular values from
# 0.001 on. Steps after these have the coefficients of the last.
POLAR_EXPRESS: Sequence[Coefficients] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
POLAR_LIMIT: Coefficients = (1.875, -1.25, 0.375)
POLAR_SAFETY = 1.01  # singular values may exceed one by so much, from rounding


def newton_schulz_coefficients(name: str, steps: int) -> tuple[Coefficients, ...]:
    """The coefficients of each step, of the set `quintic` or `polar_express`."""
    if name == "quintic":
        return (QUINTIC,) * steps
    safe = map(safe_polar_step, POLAR_EXPRESS)
    endless = chain(safe, repeat(POLAR_LIMIT))
    return tuple(islice(endless, steps))


def safe_polar_step(step: Coefficients) -> Coefficients:
    """The step for singular values that were divided by the safety factor."""
    a, b, c = step
    safe_a = a / POLAR_SAFETY
    safe_b = b / POLAR_SAFETY**3
    safe_c = c / POLAR_SAFETY**5
    return safe_a, safe_b, safe_c


@register_inner_op
def newton_schulz(x_NRC: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """Each matrix by itself: its result does not depend on the matrices beside it, so that owners of different sets of
    matrices agree to the bit."""
    result = torch.empty_like(x_NRC)
    for x, place in zip(x_NRC, result, strict=True):
        orthogonal = orthogonalised(x, coefficients)
        place.copy_(orthogonal)
    return result


def orthogonalised(x: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    rows, columns = x.shape
    if rows > columns:  # the products X X^T are smaller if X is wide
        wide = orthogonalised(x.T, coefficients)
        return wide.T
    norm = x.norm().clamp(min=LEAST_NORM)
    x = x / norm
    for a, b, c in coefficients:
        gram = matmul(x, x.T)
        polynomial = add_matmul(gram, gram, gram, beta=b, alpha=c)
        x = add_matmul(x, polynomial, x, beta=a)
    return x


@newton_schulz.register_fast("batched")
def newton_schulz_batched(x_NRC: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    _, rows, columns = x_NRC.shape
    is_tall = rows > columns
    x = x_NRC.mT if is_tall else x_NRC
    norm_N11 = x.norm(dim=(1, 2), keepdim=True)
    norm_N11 = norm_N11.clamp(min=LEAST_NORM)
    x = x / norm_N11
    for a, b, c in coefficients:
        gram = matmul(x, x.mT)
        polynomial = add_matmul(gram, gram, gram, beta=b, alpha=c)
        x = add_matmul(x, polynomial, x, beta=a)
    return x.mT.contiguous() if is_tall else x


@newton_schulz.register_fast("gram")
def newton_schulz_gram(x_NRC: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    products: GramProducts = PlainProducts()
    if x_NRC.is_cuda:
        from moefold.kernels.optimizer.newton_schulz_hopper import HopperProducts

        products = HopperProducts(x_NRC.device)
    return orthogonalise(x_NRC, coefficients, LEAST_NORM, products)


NEWTON_SCHULZ_SHAPES = [  # matrices, rows, columns: small singular values would make rounding large
    (1, 16, 64),
    (3, 24, 96),
    (5, 96, 24),
]


@newton_schulz.register_cases
def newton_schulz_cases(draw: CaseInputs) -> Cases:
    for n, rows, columns in NEWTON_SCHULZ_SHAPES:
        x_NRC = draw.normal(n, rows, columns)
        for name in ("quintic", "polar_express"):
            coefficients = newton_schulz_coefficients(name, 5)
            about = f"{n} matrices {rows} x {columns}, {name}"
            yield KernelCase(about, (x_NRC, coefficients))
