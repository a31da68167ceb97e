"""The routed experts' MLP, rows in and rows out: gather, up and gate, activation times the router's weight, down.

N source rows, R rows in expert order, D width, F inner width, K rows at most per source row, E experts. Row r is
`source_ND[index_R[r]]`; expert e's rows end before `ends_E[e]`.

    x_RD = source[index]     h_R2F = x W_gate_up     a_RF = silu(gate) * up * weight     y_RD = a W_down

The router's weight acts before the second product, which is linear, so y is not needed for any gradient:
d weight_r = (dy_r W_down) . silu(gate_r) * up_r. Applied behind the product (`weight_inside` False), the weight keeps
low-precision products more accurate, and y is saved.

The reference composes the parts that the caller passes in: products of a recipe, an activation, biases. The fused
kernel is a fast path of that composition for plain SwiGLU experts; the catalog chooses it by facts about the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.experts.expert_mlp_adapted import (
    AdaptedExpertMlp,
    FrozenExperts,
    frozen_product,
    matrices_of,
    refuse_second_backward,
)
from moefold.kernels.experts.frozen_weights import HoldsExperts
from moefold.kernels.experts.grouped_gemm import EXPERT_ROW_COUNTS, grouped_gemm
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.linear.few_rows import has_few_rows
from moefold.kernels.linear.low_rank_matrices import LowRankMatrices
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op
from moefold.kernels.routing.expert_rows import (
    gather_rows,
    shuffled_rows,
    sum_in_one_pass,
    take_gradient_ungathered,
    takes_gradient_unsummed,
)
from moefold.kernels.routing.gathered_rows import RowLinks, SummedRows
from moefold.layout.deferred_wgrad import gradient_or_defer
from moefold.layout.gradient_sink import running_gradient_sum
from moefold.layout.rerun import RERUN


def plain_up_product(x_RD: Tensor, gate_up_E2FD: Tensor, ends_E: Tensor) -> Tensor:
    gate_up_END = gate_up_E2FD.flatten(1, 2)
    h_RN = grouped_gemm(x_RD, gate_up_END, ends_E)
    gate_and_up = (2, -1)
    return h_RN.unflatten(-1, gate_and_up)


def plain_down_product(a_RF: Tensor, down_EDF: Tensor, ends_E: Tensor, inside_R: Tensor | None) -> Tensor:
    return grouped_gemm(a_RF, down_EDF, ends_E)


Gather = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
UpProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
Activation = Callable[[Tensor, Tensor | None], Tensor]
DownProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class ExpertParts(NamedTuple):
    """The ops that the experts are composed of; by default the references. `up` and `down` add biases, `down` times the
    router's weights where these act inside the activation, and the outputs of adapters. `recipe`, `down_recipe`: the
    precision recipes of the first and of the second product. `up_adapter`, `down_adapter`: for a fused kernel.
    `known_h_R2F`: the pre-activation, where kernels that multiply inside exchanges have computed it and what follows:
    then the experts are run for their backward alone (known_products.py)."""

    gather: Gather = gather_rows
    up: UpProduct = plain_up_product
    activation: Activation = swiglu
    down: DownProduct = plain_down_product
    weight_inside: bool = True
    recipe: Any = None
    down_recipe: Any = None
    up_adapter: LowRankMatrices | None = None
    down_adapter: LowRankMatrices | None = None
    known_h_R2F: Tensor | None = None

    @property
    def are_frozen(self) -> bool:
        """Whether weights have adapters beside them, or are held in blocks."""
        is_adapted = self.up_adapter is not None or self.down_adapter is not None
        return is_adapted or isinstance(self.recipe, HoldsExperts)


PLAIN_PARTS = ExpertParts()


@register_op
def expert_mlp(
    source_ND: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    holes: bool = False,
    parts: ExpertParts = PLAIN_PARTS,
) -> Tensor:
    """y_RD: each row through its expert, times its weight."""
    inside_R = weight_R if parts.weight_inside else None
    x_RD = parts.gather(source_ND, index_R, slots_NK, holes)
    h_R2F = parts.up(x_RD, gate_up_E2FD, ends_E)
    a_RF = parts.activation(h_R2F, inside_R)
    y_RD = parts.down(a_RF, down_EDF, ends_E, inside_R)
    if parts.weight_inside:
        return y_RD
    weight_R1 = weight_R[:, None]
    return y_RD * weight_R1.to(y_RD.dtype)


@expert_mlp.register_fast("gluon")
def expert_mlp_gluon(
    source_ND: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    holes: bool = False,
    parts: ExpertParts = PLAIN_PARTS,
) -> Tensor:
    inputs = (source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E)
    if len(index_R) == 0:  # nothing to launch
        return expert_mlp.reference(*inputs, holes, parts)
    if parts.are_frozen:
        return adapted_mlp(*inputs, parts)
    if not torch.is_grad_enabled() and has_few_rows(source_ND):
        return run_few_rows(*inputs)
    return ExpertMlpFunction.apply(*inputs, holes, parts.known_h_R2F)  # pyright: ignore[reportReturnType]


def adapted_mlp(
    source_ND: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    parts: ExpertParts,
) -> Tensor:
    """Beside frozen weights: adapters' products inside those of the weights."""
    up = frozen_product(gate_up_E2FD, parts.recipe, parts.up_adapter)
    down = frozen_product(down_EDF, parts.down_recipe, parts.down_adapter)
    experts = FrozenExperts(up, down)
    adapters = (*matrices_of(parts.up_adapter), *matrices_of(parts.down_adapter))
    routing = (weight_R, index_R, slots_NK, ends_E)
    return AdaptedExpertMlp.apply(experts, source_ND, *routing, *adapters)  # pyright: ignore[reportReturnType]


def run_few_rows(
    source_ND: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
) -> Tensor:
    from moefold.kernels.experts.few_rows_triton import launch_few_rows_experts

    weights = (gate_up_E2FD, down_EDF)
    return launch_few_rows_experts(source_ND, *weights, weight_R, index_R, ends_E)


@expert_mlp.register_fast("fp8")
def expert_mlp_fp8(
    source_ND: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    holes: bool = False,
    parts: ExpertParts = PLAIN_PARTS,
) -> Tensor:
    from moefold.kernels.experts.expert_mlp_fp8 import Fp8ExpertMlp

    inputs = (source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E)
    if len(index_R) == 0:  # nothing to launch
        return expert_mlp.reference(*inputs, holes, parts)
    recipes = (parts.recipe, parts.down_recipe)
    y_RD: Any = Fp8ExpertMlp.apply(*recipes, *inputs)
    take_gradient_ungathered(y_RD)
    return y_RD


class ExpertMlpFunction(torch.autograd.Function):
    """Saves the source rows and the pre-activation; backward gathers the rows and computes the activation again. The
    gradient of the pre-activation overwrites it: it is the largest tensor alive then, and a second one would be as
    large. Weight gradients are computed now or deferred, as those of linear products.

    Rows behind the last end, which there may be with `holes`, are undefined; weight gradients multiply up to 63 of them
    by zero, so these are made finite. With a known pre-activation, which is overwritten too, forward saves alone."""

    @staticmethod
    def forward(
        ctx: Any, source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E, holes, known_h_R2F=None
    ):
        from moefold.kernels.experts import grouped_gemm_launch as launch

        rows = len(index_R)
        plan = launch.RowTilePlan.of(ends_E, rows)
        h_R2F, a_RF = known_h_R2F, None
        if h_R2F is None:
            x_PD = launch.gather_expert_rows(source_ND, index_R, plan)
            h_R2F, a_RF = launch.up_projection(x_PD, gate_up_E2FD, weight_R.float(), plan)
            del x_PD
        if holes:
            h_RN = h_R2F.flatten(1)
            launch.zero_rows_behind(h_RN, ends_E)
        ctx.holes = holes
        ctx.weights = (gate_up_E2FD, down_EDF)  # the Parameter objects: their gradient sink is an attribute
        ctx.used = False
        ctx.leaves_sum = takes_gradient_unsummed(source_ND)
        routing = (weight_R, index_R, slots_NK)
        ctx.save_for_backward(source_ND, *ctx.weights, *routing, h_R2F, *plan)
        if a_RF is None or not RERUN.uses_expert_outputs:  # run for the saved tensors alone
            width = source_ND.shape[1]
            return source_ND.new_empty(rows, width)
        return launch.down_projection(a_RF, down_EDF, plan)

    @staticmethod
    def backward(ctx: Any, dy_RD):
        from moefold.kernels.experts import grouped_gemm_launch as launch

        source_ND, gate_up_E2FD, down_EDF, *rest = ctx.saved_tensors
        weight_R, index_R, slots_NK, h_R2F, *plan = rest
        refuse_second_backward(ctx)
        plan = launch.RowTilePlan(*plan)
        gate_up, down = ctx.weights
        dy_RD = dy_RD.contiguous()
        if ctx.holes:
            launch.zero_rows_behind(dy_RD, plan.ends_E)
        # Down: the data gradient, the activation once more, and the weight gradient of both.
        weight_fp32_R = weight_R.float()
        a_PF, dweight_R = launch.down_projection_dgrad(dy_RD, down_EDF, h_R2F, weight_fp32_R, plan)
        dh_R2F = h_R2F  # down_projection_dgrad has overwritten the pre-activation with its gradient
        down_wgrad = partial(expert_weight_gradient, dy_RD, a_PF, down, plan)
        ddown_EDF = gradient_or_defer(down, down_wgrad)
        del a_PF, down_wgrad  # unless the deferred product holds it, its memory is free for the rows below
        # Up: the weight gradient, whose gathered rows are free for those of the data gradient, and that, summed over
        # each source row's slots here or by whoever asked for it.
        up_wgrad = partial(up_weight_gradient, dh_R2F, source_ND, index_R, gate_up, plan)
        dgate_up_E2FD = gradient_or_defer(gate_up, up_wgrad)
        dx_RD = launch.up_projection_dgrad(dh_R2F, gate_up_E2FD, plan)
        if ctx.leaves_sum:
            dsource_ND = SummedRows(dx_RD, RowLinks(index_R, slots_NK, ctx.holes), sum_in_one_pass)
        else:
            dsource_ND = launch.sum_over_slots(dx_RD, slots_NK)
        dweight_R = dweight_R.to(weight_R.dtype)
        gradients = (dsource_ND, dgate_up_E2FD, ddown_EDF, dweight_R)
        return *gradients, None, None, None, None, None


def up_weight_gradient(
    dh_R2F: Tensor,
    source_ND: Tensor,
    index_R: Tensor,
    gate_up_E2FD: Tensor,
    plan: Any,
) -> Tensor | None:
    """Gathers the rows when it is called: a deferred gradient holds the source rows only."""
    from moefold.kernels.experts import grouped_gemm_launch as launch

    x_PD = launch.gather_expert_rows(source_ND, index_R, plan)
    dh_RN = dh_R2F.flatten(1)
    return expert_weight_gradient(dh_RN, x_PD, gate_up_E2FD, plan)


def expert_weight_gradient(left_RM: Tensor, right_PN: Tensor, weight: Tensor, plan: Any) -> Tensor | None:
    """The gradient of a weight; or None if it was added, unrounded, to the sum in the weight's sink."""
    from moefold.kernels.experts import grouped_gemm_launch as launch

    into = running_gradient_sum(weight)
    return launch.expert_wgrad(left_RM, right_PN, weight, plan, into)


Routing = tuple[Tensor, Tensor, Tensor, bool]  # index_R, slots_NK, ends_E, holes


def shuffled_routing(counts: list[int], k: int, device: str) -> Routing:
    """For experts with so many rows, k rows for each source row; no slot is empty."""
    rows = sum(counts)
    generator = torch.Generator()
    generator.manual_seed(rows)
    order = torch.randperm(rows, generator=generator)
    order = order.to(device)
    index = order // k
    row_of_choice = order.argsort()
    slots = row_of_choice.view(-1, k)
    counts_E = torch.tensor(counts, device=device)
    ends = counts_E.cumsum(0).int()
    return index, slots, ends, False


LARGE_ROW_COUNTS = {
    "more than a tile": [130, 0, 63, 319],
    "all to one": [0, 0, 512, 0],
    "a tile and a half": [192, 64, 1, 127],
}


EXPERT_WIDTHS = [  # D, F
    (16, 24),
    (128, 256),
]


@expert_mlp.register_cases
def expert_mlp_cases(draw: CaseInputs) -> Cases:
    all_counts = EXPERT_ROW_COUNTS | LARGE_ROW_COUNTS
    for name, counts in all_counts.items():
        rows = sum(counts)
        experts = len(counts)
        k = 1 if rows % 2 else 2
        sources = rows // k
        routing = shuffled_routing(counts, k, draw.device)
        for d, f in EXPERT_WIDTHS:
            source = draw.normal(sources, d)
            weights = random_experts(draw, experts, d, f)
            weight = router_weights(draw, rows)
            inputs = (source, *weights, weight, *routing)
            yield KernelCase(f"{name}, {d} by {f}", inputs, hidden=d, ffn=f)
    yield from cases_with_holes(draw)


def cases_with_holes(draw: CaseInputs) -> Cases:
    index, slots, holes = shuffled_rows(32, 4, draw.device, drop=3)
    rows = len(index)
    third = rows // 3
    ends = [third, third, rows]
    ends_E = torch.tensor(ends, dtype=torch.int32, device=draw.device)
    source = draw.normal(32, 128)
    gate_up, down = random_experts(draw, 3, 128, 256)
    weight = router_weights(draw, rows)
    # Rows of padding, and choices that have no row.
    floats = (source, gate_up, down)
    rest = (slots, ends_E, holes)
    inputs = (*floats, weight, index, *rest)
    case = KernelCase("with holes", inputs, hidden=128, ffn=256)
    yield case
    # The same with undefined rows behind the last end.
    padding = (0, 70)
    index = F.pad(index, padding, value=-1)
    weight = F.pad(weight, padding)
    inputs = (*floats, weight, index, *rest)
    undefined = (rows, rows + 70)
    name = f"{case.name}, 70 rows undefined"
    yield replace(case, name=name, inputs=inputs, rows=undefined)


def router_weights(draw: CaseInputs, rows: int) -> Tensor:
    weight = draw.wide(rows, seed=3)
    return weight.abs()


def random_experts(draw: CaseInputs, experts: int, d: int, f: int) -> tuple[Tensor, Tensor]:
    """Weights of gate and up, and of down."""
    up_scale = d**-0.5
    gate_up = draw.normal(experts, 2, f, d, seed=1, scale=up_scale)
    down_scale = f**-0.5
    down = draw.normal(experts, d, f, seed=2, scale=down_scale)
    return gate_up, down
