"""The fused experts beside frozen weights: outputs and gradients are those of the composition, with adapters of one
product or of both, with weights whole or some experts' at a time."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import moefold.kernels.experts
from moefold.kernels.experts.expert_mlp import ExpertParts, expert_mlp, shuffled_routing
from moefold.kernels.experts.frozen_weights import HeldWeights, Tail
from moefold.kernels.experts.grouped_gemm import grouped_gemm
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.linear.low_rank_matrices import LowRankMatrices
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.layout.gradient_sink import attach_gradient_sink
from tests.kernels.experts.test_expert_mlp import PlainLaunches, needs_hopper

COUNTS = [70, 0, 3, 129, 1, 31]
ADAPTED = {"both": (True, True), "up": (True, False), "down": (False, True), "neither": (False, False)}


class HeldRecipe:
    """Weights that are made two experts at a time."""

    name = "held"

    def __init__(self, part: int = 2):
        self.part = part
        self.loaded: list[slice] = []

    def held_experts(self, weight: torch.Tensor) -> HeldWeights:
        def load(some: slice) -> torch.Tensor:
            self.loaded.append(some)
            return weight[some]

        return HeldWeights(tuple(weight.shape), self.part, load)


class PartsInTurn(PlainLaunches):
    """Plain launches with tails, and with weights that are made in parts; padded rows are those of the tests of tiles,
    so here none is padded."""

    class RowTilePlan(NamedTuple):
        ends_E: torch.Tensor
        tiles_M4: torch.Tensor
        count: torch.Tensor
        pads_E: torch.Tensor

        @classmethod
        def of(cls, ends_E: torch.Tensor, rows: int) -> PartsInTurn.RowTilePlan:
            from moefold.kernels.routing.rows_triton import plan_row_tiles

            tiles, count, _ = plan_row_tiles(ends_E, rows)
            begins = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
            return cls(ends_E, tiles, count, begins)

    def up_projection(self, x, gate_up, weight, plan, tail=None):
        h, _ = super().up_projection(x, whole(gate_up), weight, plan)
        if tail is not None:
            h = h + tail_product(tail, plan.ends_E, by_row=True).view_as(h)
        return h, swiglu(h, weight)

    def down_projection(self, a, down, plan, tail=None):
        y = super().down_projection(a, whole(down), plan)
        return y if tail is None else y + tail_product(tail, plan.ends_E, by_row=True)

    def down_projection_dgrad(self, dy, down, h, weight, plan, tail=None):
        """The tail's part of the gradient comes in as a further expert weight would: through dy."""
        with torch.enable_grad():
            inputs = h.clone().requires_grad_(), weight.clone().requires_grad_()
            a = swiglu(*inputs)
        da = grouped_gemm(dy, whole(down).mT, plan.ends_E)
        if tail is not None:
            da = da + tail_product(tail, plan.ends_E, by_row=False)
        dh, dweight = torch.autograd.grad(a, inputs, da)
        h.copy_(dh)
        return a.detach(), dweight

    def up_projection_dgrad(self, dh, gate_up, plan, tail=None):
        dx = super().up_projection_dgrad(dh, whole(gate_up), plan)
        return dx if tail is None else dx + tail_product(tail, plan.ends_E, by_row=False)


def whole(weights: torch.Tensor | HeldWeights) -> torch.Tensor:
    if isinstance(weights, torch.Tensor):
        return weights
    starts = range(0, weights.shape[0], weights.experts)
    return torch.cat([weights.load(slice(start, start + weights.experts)) for start in starts])


def tail_product(tail: Tail, ends: torch.Tensor, by_row: bool) -> torch.Tensor:
    matrices = tail.matrices.flatten(1, -2)
    return grouped_gemm(tail.low_RL, matrices if by_row else matrices.mT, ends)


class Drawn(NamedTuple):
    floats: list[torch.Tensor]  # source, gate and up, down, router's weights
    routing: tuple
    matrices: list[torch.Tensor]  # A and B of up, A and B of down
    dy: torch.Tensor


def drawn(counts: list[int], d: int, f: int, rank: int, device: str, dtype: torch.dtype) -> Drawn:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    e, k = len(counts), 2 if sum(counts) % 2 == 0 else 1
    routing = shuffled_routing(counts, k, device)
    weights = [normal(e, 2, f, d, scale=d**-0.5), normal(e, d, f, scale=f**-0.5)]
    router = torch.rand(sum(counts), generator=generator).to(device)
    up = [normal(e, rank, d, scale=d**-0.5), normal(e, 2, f, rank, scale=rank**-0.5)]
    down = [normal(e, rank, f, scale=f**-0.5), normal(e, d, rank, scale=rank**-0.5)]
    floats = [normal(sum(counts) // k, d), *weights, router]
    return Drawn(floats, routing, [*up, *down], normal(sum(counts), d))


def composition(up: LowRankMatrices | None, down: LowRankMatrices | None) -> ExpertParts:
    """The parts of the reference, with adapters written out."""

    def low_rank(x: torch.Tensor, adapter: LowRankMatrices | None, ends: torch.Tensor) -> Any:
        if adapter is None:
            return 0.0
        low = grouped_gemm(x, adapter.a, ends) * adapter.scale
        return grouped_gemm(low, adapter.b.flatten(1, -2), ends)

    def project_up(x: torch.Tensor, gate_up: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = grouped_gemm(x, gate_up.flatten(1, 2), ends) + low_rank(x, up, ends)
        return h.unflatten(-1, (2, -1))

    def project_down(a: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, _: Any) -> torch.Tensor:
        return grouped_gemm(a, weight, ends) + low_rank(a, down, ends)

    return ExpertParts(up=project_up, down=project_down, up_adapter=up, down_adapter=down)


def outcome(name: str, case: Drawn, adapted: tuple[bool, bool], recipe: Any = None, dtype: Any = None) -> list[Any]:
    """The output, and gradients of source, router's weights and matrices."""
    source, gate_up, down, router = [x.detach().to(dtype or x.dtype) for x in case.floats]
    matrices = [x.detach().to(dtype or x.dtype).requires_grad_() for x in case.matrices]
    has_up, has_down = adapted
    up = LowRankMatrices(matrices[0], matrices[1], 0.5) if has_up else None
    below = LowRankMatrices(matrices[2], matrices[3], 2.0) if has_down else None
    parts = composition(up, below)._replace(recipe=recipe, down_recipe=recipe)
    source.requires_grad_()
    router.requires_grad_()
    y = expert_mlp.implementations[name](source, gate_up, down, router, *case.routing, parts)
    y.backward(case.dy.to(y.dtype))
    return [y.detach(), source.grad, router.grad, *(matrix.grad for matrix in matrices)]


NAMES = ("y", "source", "router", "A of up", "B of up", "A of down", "B of down")


@pytest.fixture
def plain_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = "moefold.kernels.experts.grouped_gemm_launch"
    monkeypatch.setitem(sys.modules, launches, PartsInTurn(launches))
    monkeypatch.delattr(moefold.kernels.experts, "grouped_gemm_launch", raising=False)


@pytest.mark.parametrize("recipe", [None, HeldRecipe()], ids=["whole", "in parts"])
@pytest.mark.parametrize("adapted", ADAPTED)
def test_the_function_gives_outputs_and_gradients_of_the_composition(plain_launches: None, adapted: str, recipe: Any):
    if adapted == "neither" and recipe is None:
        recipe = HeldRecipe(6)  # without adapters the function is that of weights in blocks
    case = drawn(COUNTS, 40, 24, 8, "cpu", torch.float32)
    mine = outcome("gluon", case, ADAPTED[adapted], recipe)
    right = outcome("reference", case, ADAPTED[adapted], None, torch.float64)
    for name, found, judge in zip(NAMES, mine, right, strict=True):
        assert (found is None) == (judge is None), name
        if judge is not None:
            torch.testing.assert_close(found.double(), judge, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_of_matrices_come_later_and_land_where_they_shall(plain_launches: None):
    case = drawn(COUNTS, 40, 24, 8, "cpu", torch.float32)
    right = outcome("reference", case, (True, True))[3:]
    sums = [torch.ones_like(x).flatten() for x in case.matrices]
    for matrix, total in zip(case.matrices, sums, strict=True):
        matrix.requires_grad_()
        attach_gradient_sink(matrix, lambda dtype: None, lambda total=total: total)
    a, b, c, d = case.matrices
    parts = composition(LowRankMatrices(a, b, 0.5), LowRankMatrices(c, d, 2.0))
    y = expert_mlp.implementations["gluon"](*case.floats, *case.routing, parts)
    queue: list[DeferredWork] = []
    with deferring_weight_grads(queue):
        y.backward(case.dy)
    assert len(queue) == 4
    assert all(bool((total == 1).all()) for total in sums)
    for work in queue:
        work()
    for matrix, total, judge in zip(case.matrices, sums, right, strict=True):
        torch.testing.assert_close(total.view(matrix.shape) - 1, judge, rtol=1e-4, atol=1e-4)


ROUTINGS = {
    "even": [512] * 16,
    "skewed": [4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1, 0, 0],
    "ends inside tiles": [65, 63, 127, 129, 1, 191, 193, 255] * 2,
}


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, HeldRecipe(5)], ids=["whole", "in parts"])
@pytest.mark.parametrize(("d", "f", "rank"), [(512, 768, 16), (360, 704, 8), (2048, 768, 64), (256, 136, 96)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_on_a_gpu_it_agrees_with_fp32_and_repeats_to_the_bit(routing: str, d: int, f: int, rank: int, recipe: Any):
    case = drawn(ROUTINGS[routing], d, f, rank, "cuda", torch.bfloat16)
    first, second = (outcome("gluon", case, (True, True), recipe) for _ in range(2))
    exact = outcome("reference", case, (True, True), None, torch.float32)
    for name, found, again, judge in zip(NAMES, first, second, exact, strict=True):
        assert torch.equal(found, again), f"{name} differs between two runs"
        off = ((found.float() - judge).norm() / judge.norm()).item()
        assert off < 1.5e-2, f"{name} is off by {off:.1e} of its length"


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("adapted", ["both", "neither"])
def test_on_a_gpu_weights_in_parts_give_the_bits_of_whole_ones_and_nothing_waits(adapted: str):
    case = drawn(ROUTINGS["skewed"], 512, 768, 16, "cuda", torch.bfloat16)
    outcome("gluon", case, ADAPTED[adapted], HeldRecipe(5))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts, whole_ones = (outcome("gluon", case, ADAPTED[adapted], HeldRecipe(part)) for part in (5, 16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, mine, other in zip(NAMES, parts, whole_ones, strict=True):
        assert mine is other is None or torch.equal(mine, other), name
