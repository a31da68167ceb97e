"""Newton-Schulz in Gram form: the steps multiply symmetric R x R matrices, and X is multiplied a few times only.

    G = X X^T                          before the first step, of X / |X|, and anew after the steps of RESTART
    P = a I + b G + c G G              of each step
    Q = Q P                            what the steps since the last G from X multiply X by
    G = (G P) P                        of the next step
    X = Q X                            before each new G, and at the end; the first Q is divided by |X|

For tall matrices X^T takes the place of X, without a copy. G, P and Q are polynomials of one matrix: their products are
symmetric. Between products numbers are fp16, whose rounding is an eighth of bf16's; the first X and Q have the dtype of
the matrices, whose norms must be below 1e19: sums are fp32. Rounding can make small eigenvalues of G negative, and a
step makes those larger by a^2; a new G from X has none of that.

`GramProducts` multiplies: in plain operations of torch here, in kernels for Hopper in newton_schulz_hopper.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

RESTART = 2
STEPS_PER_GRAM = 3  # after the first restart
GRAM_ELEMENTS = 2**29  # of all G that are worked on at a time

Step = tuple[float, float, float]  # a, b, c
Steps = Sequence[Step]


class WholeForm(NamedTuple):
    """How Q is stored for the product with X: in this dtype, all tiles, each matrix multiplied by its scale."""

    dtype: torch.dtype
    scales_N: Tensor | None


class GramProducts(Protocol):
    """Products of Newton-Schulz. X is wide (N, R, C) or tall (N, C, R); G, P and Q are (N, R, R), in fp16, of which
    tiles above the diagonal may be missing unless Q is `whole`. `batch`: of so many matrices work is spread evenly."""

    @property
    def batch(self) -> int: ...

    def aligned(self, x: Tensor) -> Tensor:
        """The matrices as products can read them: contiguous, with zeros behind rows and columns if need be."""
        ...

    def inverse_norms(self, x: Tensor, least_norm: float) -> Tensor: ...

    def gram(self, x: Tensor, scales_N: Tensor | None) -> Tensor: ...

    def factor(self, gram_NRR: Tensor, step: Step) -> Tensor:
        """P of a step."""
        ...

    def product(self, a_NRR: Tensor, b_NRR: Tensor, whole: WholeForm | None = None) -> Tensor: ...

    def whole(self, q_NRR: Tensor, form: WholeForm) -> Tensor: ...

    def apply(self, q_NRR: Tensor, x: Tensor, out: Tensor) -> None:
        """Q X, of tall matrices X Q."""
        ...


def orthogonalise(x_NRC: Tensor, coefficients: Steps, least_norm: float, products: GramProducts) -> Tensor:
    """`least_norm`: matrices of a smaller norm are not scaled up to one."""
    result = torch.empty_like(x_NRC, memory_format=torch.contiguous_format)
    _, rows, columns = x_NRC.shape
    if result.numel() == 0:
        return result
    shorter = min(rows, columns)
    together = matrices_together(shorter, products.batch)
    xs = x_NRC.split(together)
    outs = result.split(together)
    for x, out in zip(xs, outs, strict=True):
        aligned = products.aligned(x)
        if aligned.shape == out.shape:
            take_steps(aligned, out, coefficients, least_norm, products)
            continue
        padded = torch.empty_like(aligned)
        take_steps(aligned, padded, coefficients, least_norm, products)
        out.copy_(padded[:, :rows, :columns])
    return result


def matrices_together(rows: int, batch: int) -> int:
    """How many matrices are worked on at a time: whole batches, if one fits."""
    most = max(1, GRAM_ELEMENTS // rows**2)
    if most < batch:
        return most
    batches = most // batch
    return batches * batch


def take_steps(x: Tensor, out: Tensor, coefficients: Steps, least_norm: float, products: GramProducts) -> None:
    """All steps, into `out`."""
    scales_N: Tensor | None = products.inverse_norms(x, least_norm)
    *earlier, last = steps_by_gram(coefficients)
    for steps in earlier:
        q = product_of_steps(x, scales_N, steps, products)
        following = torch.empty_like(x, dtype=torch.float16)
        products.apply(q, x, following)
        x = following
        scales_N = None
    q = product_of_steps(x, scales_N, last, products)
    products.apply(q, x, out)


def steps_by_gram(coefficients: Steps) -> list[Steps]:
    """The steps between one G from X and the next."""
    parts = [coefficients[:RESTART]]
    for first in range(RESTART, len(coefficients), STEPS_PER_GRAM):
        last = first + STEPS_PER_GRAM
        parts.append(coefficients[first:last])
    return parts


def product_of_steps(x: Tensor, scales_N: Tensor | None, steps: Steps, products: GramProducts) -> Tensor:
    """Q of these steps."""
    squares_N = None if scales_N is None else scales_N.square()
    whole = WholeForm(x.dtype, scales_N)
    gram = products.gram(x, squares_N)
    first, *others = steps
    factor = products.factor(gram, first)
    if not others:
        return products.whole(factor, whole)
    product = factor
    for number, step in enumerate(others, start=1):
        gram = products.product(gram, factor)
        gram = products.product(gram, factor)
        factor = products.factor(gram, step)
        is_last = number == len(others)
        product = products.product(product, factor, whole if is_last else None)
    return product


def is_tall(x: Tensor) -> bool:
    _, rows, columns = x.shape
    return rows > columns


class PlainProducts:
    """Products in torch, of fp32 sums, all tiles there: what the kernels are measured by."""

    batch = 1

    def aligned(self, x: Tensor) -> Tensor:
        return x

    def inverse_norms(self, x: Tensor, least_norm: float) -> Tensor:
        norms = [matrix.float().norm() for matrix in x]  # each by itself: in an order of its own
        norms_N = torch.stack(norms)
        return 1 / norms_N.clamp(min=least_norm)

    def gram(self, x: Tensor, scales_N: Tensor | None) -> Tensor:
        wide = x.float()
        if is_tall(x):
            wide = wide.mT
        sums = products_of_each(wide, wide.mT)
        if scales_N is not None:
            sums = sums * scales_N[:, None, None]
        return symmetric(sums).half()

    def factor(self, gram_NRR: Tensor, step: Step) -> Tensor:
        a, b, c = step
        gram = gram_NRR.float()
        squares = products_of_each(gram, gram)
        sums = c * squares + b * gram
        diagonal = sums.diagonal(dim1=1, dim2=2)
        diagonal.add_(a)
        return symmetric(sums).half()

    def product(self, a_NRR: Tensor, b_NRR: Tensor, whole: WholeForm | None = None) -> Tensor:
        left = a_NRR.float()
        right = b_NRR.float()
        sums = products_of_each(left, right)
        result = symmetric(sums)
        if whole is None:
            return result.half()
        return self.whole(result, whole)

    def whole(self, q_NRR: Tensor, form: WholeForm) -> Tensor:
        q = q_NRR.float()
        if form.scales_N is not None:
            q = q * form.scales_N[:, None, None]
        return q.to(form.dtype)

    def apply(self, q_NRR: Tensor, x: Tensor, out: Tensor) -> None:
        left = q_NRR.float()
        right = x.float()
        if is_tall(x):
            left, right = right, left
        result = products_of_each(left, right)
        out.copy_(result)


def products_of_each(a: Tensor, b: Tensor) -> Tensor:
    """One product after the other: a batched one may add in another order for another number of matrices."""
    pairs = zip(a, b, strict=True)
    products = [left @ right for left, right in pairs]
    return torch.stack(products)


def symmetric(x_NRR: Tensor) -> Tensor:
    """The values on and below the diagonal, above it too."""
    lower = x_NRR.tril()
    below = x_NRR.tril(-1)
    return lower + below.mT
