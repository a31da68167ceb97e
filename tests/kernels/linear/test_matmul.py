"""Products of 16-bit matrices on a CPU: those of fp32, rounded once, and never those of torch without instructions for
them; rows of a tiled product do not depend on the other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.kernels.linear.matmul import add_matmul, matmul, matmul_into, tiled_product
from moefold.kernels.linear.product import cpu_multiplies
from moefold.layout.axes import single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import train_step

NARROW = [torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rounded_once(exact: Tensor, dtype: torch.dtype, got: Tensor) -> None:
    """`got` is `exact` rounded to `dtype`, but for sums in fp32 that fall to the other side of the middle."""
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=step * 0.51, atol=1e-5)


@pytest.mark.parametrize("dtype", NARROW)
def test_products_of_narrow_matrices_are_rounded_once(dtype: torch.dtype):
    a, b, x = (random(*shape, dtype=dtype) for shape in ((33, 70), (70, 17), (33, 17)))
    exact = a.double() @ b.double()
    rounded_once(exact, dtype, matmul(a, b))
    out = torch.empty_like(x)
    matmul_into(out, a, b)
    assert torch.equal(out, matmul(a, b))
    rounded_once(0.5 * x.double() + 2 * exact, dtype, add_matmul(x, a, b, beta=0.5, alpha=2.0))
    batched = add_matmul(x[None], a[None], b[None], beta=0.5, alpha=2.0)
    rounded_once(0.5 * x.double() + 2 * exact, dtype, batched[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_matrices_are_multiplied_as_they_are(dtype: torch.dtype):
    a, b = random(9, 5, dtype=dtype), random(5, 7, dtype=dtype)
    assert torch.equal(matmul(a, b), a @ b)


def test_a_row_of_a_tiled_product_does_not_depend_on_the_others():
    x, w = random(150, 40), random(24, 40)
    whole = tiled_product(x, w)
    for rows in (1, 63, 64, 65):
        assert torch.equal(tiled_product(x[:rows], w), whole[:rows])


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_dot_product")


class NarrowProducts(TorchDispatchMode):
    """Names of torch's products of 16-bit operands on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        operands = [x for x in args if isinstance(x, Tensor)]
        if name.startswith(PRODUCTS) and operands[0].dtype in NARROW:
            self.seen.add(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(cpu_multiplies(torch.bfloat16), reason="this processor multiplies bf16 numbers")
@pytest.mark.parametrize("words", [["tiny"], ["tiny", "--optim.rule", "muon"], ["deepseek-v3", "--model.layers", "2"]])
def test_a_step_in_bf16_multiplies_in_fp32_where_the_processor_has_no_instructions_for_bf16(words: list[str]):
    preset, *keys = words
    config = shrink_config(resolve_recipe(preset, [*keys, "--train.precision", "bf16"], 1), 1)
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    with NarrowProducts() as products:
        train_step(run, run.loader.next_batch())
    assert products.seen == set()
