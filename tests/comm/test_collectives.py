"""Collectives against a plain computation, and each backward against the definition of an adjoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from moefold.comm.collectives import (
    all_gather,
    all_gather_no_grad,
    all_reduce,
    all_reduce_max_no_grad,
    all_reduce_no_grad,
    all_to_all,
    all_to_all_no_grad,
    reduce_scatter,
    reduce_scatter_no_grad,
)
from moefold.layout.axes import Axis, World
from tests.support.ranks import run_ranks

SIZES = [1, 2, 4]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sent_rows(kind: str, size: int) -> list[list[int]]:
    """[from][to]: how many rows travel."""
    return {
        "even": [[2] * size for _ in range(size)],
        "uneven": [[(3 * a + 2 * b) % 5 for b in range(size)] for a in range(size)],
        "to one": [[4 if b == size - 1 else 0 for b in range(size)] for _ in range(size)],
        "an empty rank": [[0 if 0 in (a, b) else a + b for b in range(size)] for a in range(size)],
        "no rows": [[0] * size for _ in range(size)],
    }[kind]


def blocks(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    return x.split(sizes)


# name -> (rows of x on a rank, the collective, the same from all ranks' x)
Plain = Callable[[list[torch.Tensor], int], torch.Tensor]


def cases(size: int) -> dict[str, tuple[Callable[[int], int], Callable[[torch.Tensor, Axis], torch.Tensor], Plain]]:
    found: dict[str, Any] = {}
    for rows in (3, 0):
        found[f"gather {rows}"] = (lambda _, n=rows: n, all_gather, lambda xs, _: torch.cat(xs))
        found[f"total {rows}"] = (lambda _, n=rows: n, all_reduce, lambda xs, _: torch.stack(xs).sum(0))
    for rows in (2, 0):
        found[f"scatter_sum {rows}"] = (
            lambda _, n=rows: n * size,
            reduce_scatter,
            lambda xs, rank: torch.stack(xs).sum(0).tensor_split(size)[rank],
        )
    for kind in ("even", "uneven", "to one", "an empty rank", "no rows"):
        sent = sent_rows(kind, size)

        def across(x: torch.Tensor, axis: Axis, sent: list[list[int]] = sent) -> torch.Tensor:
            return all_to_all(x, sent[axis.index], [row[axis.index] for row in sent], axis)

        def plain(xs: list[torch.Tensor], rank: int, sent: list[list[int]] = sent) -> torch.Tensor:
            return torch.cat([blocks(x, row)[rank] for x, row in zip(xs, sent, strict=True)])

        found[f"exchange {kind}"] = (lambda rank, sent=sent: sum(sent[rank]), across, plain)
    return found


NAMES = list(cases(2))


def everything(world: World) -> dict[str, tuple[torch.Tensor, ...]]:
    """For each case: input, output, a random direction and the gradient along it; inputs are not contiguous."""
    seen = {}
    for number, (name, (rows, collective, _)) in enumerate(cases(world.size).items()):
        seed = 100 * number + world.rank
        x = numbers(2, rows(world.rank), seed=seed).T.requires_grad_()
        y = collective(x, world.everyone)
        direction = numbers(2, len(y), seed=seed + 50).T
        (gradient,) = torch.autograd.grad(y, x, direction)
        seen[name] = (x.detach(), y.detach(), direction, gradient)
    return seen


@cache
def on_ranks(size: int) -> list[dict[str, tuple[torch.Tensor, ...]]]:
    return run_ranks(everything, size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_forward_is_the_plain_computation(size: int, name: str):
    plain = cases(size)[name][2]
    xs = [rank[name][0] for rank in on_ranks(size)]
    for rank, found in enumerate(on_ranks(size)):
        torch.testing.assert_close(found[name][1], plain(xs, rank), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_backward_is_the_adjoint(size: int, name: str):
    """<A x, y> = <x, A^T y>, where x and y are what all ranks hold together."""
    seen = [rank[name] for rank in on_ranks(size)]
    there = sum((y * direction).sum().item() for _, y, direction, _ in seen)
    back = sum((x * gradient).sum().item() for x, _, _, gradient in seen)
    assert there == pytest.approx(back, rel=1e-12, abs=1e-12)
    assert all(x.shape == gradient.shape for x, _, _, gradient in seen)
    assert there != 0 or sum(x.numel() for x, *_ in seen) == 0, "the case is not trivial"


def adjoint_of_each_input(world: World) -> list[bool]:
    """A^T of the plain collectives, element by element: the gradient of rank r's every element is what plain autograd
    gives through the computation on all ranks' inputs."""
    same = []
    for number, (rows, collective, plain) in enumerate(cases(world.size).values()):
        xs = [numbers(rows(r), 2, seed=100 * number + r).requires_grad_() for r in range(world.size)]
        outputs = [plain(xs, r) for r in range(world.size)]
        directions = [numbers(*y.shape, seed=100 * number + 50 + r) for r, y in enumerate(outputs)]
        expected = torch.autograd.grad(outputs, xs, directions)[world.rank]
        x = xs[world.rank].detach().requires_grad_()
        (found,) = torch.autograd.grad(collective(x, world.everyone), x, directions[world.rank])
        same.append(torch.allclose(found, expected, rtol=1e-13, atol=1e-13))
    return same


def test_every_element_gets_the_gradient_of_the_plain_computation():
    assert all(all(rank) for rank in run_ranks(adjoint_of_each_input, 4))


ONE = Axis("one")
PLAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum_": lambda x: all_reduce_no_grad(x, ONE),
    "max_": lambda x: all_reduce_max_no_grad(x, ONE),
    "gather_plain": lambda x: all_gather_no_grad(x, ONE),
    "scatter_sum_plain": lambda x: reduce_scatter_no_grad(x, ONE),
    "exchange_plain": lambda x: all_to_all_no_grad(x, [5], [5], ONE),
    "gather": lambda x: all_gather(x, ONE),
    "scatter_sum": lambda x: reduce_scatter(x, ONE),
    "exchange": lambda x: all_to_all(x, [5], [5], ONE),
    "total": lambda x: all_reduce(x, ONE),
}


@pytest.mark.parametrize("name", PLAINS)
def test_on_an_axis_of_one_rank_the_very_input_comes_back(name: str):
    x = numbers(5, 2, seed=1)
    assert PLAINS[name](x) is x


def in_place(world: World) -> tuple[list[float], list[float], bool, str]:
    x = torch.tensor([world.rank, -world.rank, 2.0**world.rank])
    summed, largest = x.clone(), x.clone()
    same = (
        all_reduce_no_grad(summed, world.everyone) is summed
        and all_reduce_max_no_grad(largest, world.everyone) is largest
    )
    kept = torch.ones(2, requires_grad=True)
    all_reduce(kept, world.everyone)
    assert (kept == 1).all(), "a differentiable sum leaves its input alone"
    try:
        reduce_scatter(torch.zeros(world.size + 1, 2), world.everyone)
    except ValueError as error:
        return (
            summed.tolist(),
            largest.tolist(),
            same,
            str(error),
        )
    raise AssertionError("rows that do not split were accepted")


def test_sums_and_largest_values_in_place_and_a_refused_split():
    for summed, largest, same, message in run_ranks(in_place, 4):
        assert summed == [6.0, -6.0, 15.0]
        assert largest == [3.0, 0.0, 8.0]
        assert same
        assert message == "5 rows do not split over world of size 4"
