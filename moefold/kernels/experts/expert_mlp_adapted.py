"""The fused expert MLP beside frozen weights: adapters are added inside its products (LoRA), and weights may be held in
blocks (QLoRA), of which some experts' are dequantised at a time.

    low_RL = s * x A^T     h_R2F = x W_gate_up + low B^T     a_RF = silu(gate) * up * weight
    low_RL = s * a A^T     y_RD  = a W_down    + low B^T

A product with B is a tail of the contraction with W (grouped_gemm_hopper.py), and so are those with A in backward: no
pass over memory adds two outputs. Products with a rank on one side read their wide rows once (low_rank_triton.py).
Weights have no gradient, so that no product reads rows behind the last expert's; gradients of A and B are computed now
or deferred, as any weight's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.experts.frozen_weights import Tail, Weights, weights_to_read
from moefold.kernels.linear.low_rank_matrices import LowRankMatrices
from moefold.layout.deferred_wgrad import gradient_or_defer
from moefold.layout.gradient_sink import memory_for_gradient, running_gradient_sum
from moefold.layout.rerun import RERUN

Matrices = Tensor | None  # A or B; None: there is no adapter
Gradient = Tensor | None


class FrozenProduct(NamedTuple):
    """A product of experts: its weight, the recipe that the weight is held in, and the adapter's scale."""

    weight: Tensor
    recipe: Any
    scale: float

    @property
    def weights(self) -> Weights:
        return weights_to_read(self.recipe, self.weight)


class FrozenExperts(NamedTuple):
    up: FrozenProduct
    down: FrozenProduct


def frozen_product(weight: Tensor, recipe: Any, adapter: LowRankMatrices | None) -> FrozenProduct:
    scale = 1.0 if adapter is None else adapter.scale
    return FrozenProduct(weight, recipe, scale)


def matrices_of(adapter: LowRankMatrices | None) -> tuple[Matrices, Matrices]:
    return (None, None) if adapter is None else (adapter.a, adapter.b)


class AdaptedExpertMlp(torch.autograd.Function):
    """Saves the source rows, the pre-activation, and both products with A. The gradient of the pre-activation
    overwrites it, so that backward runs once."""

    @staticmethod
    def forward(ctx: Any, experts, source_ND, weight_R, index_R, slots_NK, ends_E, *adapters):
        from moefold.kernels.experts import grouped_gemm_launch as launch

        up_a, up_b, down_a, down_b = adapters
        up, down = experts
        rows = len(index_R)
        plan = launch.RowTilePlan.of(ends_E, rows)
        x_PD = launch.gather_expert_rows(source_ND, index_R, plan)
        up_low_RL = inputs_times_a(source_ND, up_a, up.scale, plan, index_R)
        tail = tail_of(up_low_RL, up_b)
        h_R2F, a_RF = launch.up_projection(x_PD, up.weights, weight_R.float(), plan, tail)
        del x_PD
        down_low_RL = inputs_times_a(a_RF, down_a, down.scale, plan)
        ctx.experts = experts
        ctx.adapters = adapters  # the Parameter objects: their gradient sink is an attribute
        ctx.used = False
        routing = (weight_R, index_R, slots_NK)
        ctx.save_for_backward(source_ND, *routing, h_R2F, up_low_RL, down_low_RL, *plan)
        if not RERUN.uses_expert_outputs:  # a rerun for the saved tensors alone
            width = source_ND.shape[1]
            return source_ND.new_empty(rows, width)
        tail = tail_of(down_low_RL, down_b)
        return launch.down_projection(a_RF, down.weights, plan, tail)

    @staticmethod
    def backward(ctx: Any, dy_RD):
        from moefold.kernels.experts import grouped_gemm_launch as launch

        source_ND, weight_R, index_R, slots_NK, h_R2F, up_low_RL, down_low_RL, *plan = ctx.saved_tensors
        refuse_second_backward(ctx)
        plan = launch.RowTilePlan(*plan)
        up_a, up_b, down_a, down_b = ctx.adapters
        up, down = ctx.experts
        dy_RD = dy_RD.contiguous()
        # Down: the data gradient, the activation once more, and the gradients of both matrices.
        dlow_RL = gradient_times_b(dy_RD, down_b, down.scale, plan)
        tail = tail_of(dlow_RL, down_a)
        a_PF, dweight_R = launch.down_projection_dgrad(dy_RD, down.weights, h_R2F, weight_R.float(), plan, tail)
        dh_RN = h_R2F.flatten(1)  # the gradient of the pre-activation overwrites it
        ddown_b = matrix_gradient(down_b, dy_RD, down_low_RL, plan.ends_E)
        ddown_a = matrix_gradient(down_a, a_PF, dlow_RL, plan.ends_E, by_row=True, starts_E=plan.pads_E)
        del a_PF
        # Up: the data gradient summed over each source row's slots, and the gradients of both matrices.
        dlow_RL = gradient_times_b(dh_RN, up_b, up.scale, plan)
        dsource_ND = None
        if ctx.needs_input_grad[1]:
            tail = tail_of(dlow_RL, up_a)
            dx_RD = launch.up_projection_dgrad(h_R2F, up.weights, plan, tail)
            dsource_ND = launch.sum_over_slots(dx_RD, slots_NK)
            del dx_RD
        dup_b = matrix_gradient(up_b, dh_RN, up_low_RL, plan.ends_E)
        dup_a = matrix_gradient(up_a, source_ND, dlow_RL, plan.ends_E, by_row=True, index_R=index_R)
        dweight_R = dweight_R.to(weight_R.dtype)
        return None, dsource_ND, dweight_R, None, None, None, dup_a, dup_b, ddown_a, ddown_b


def refuse_second_backward(ctx: Any) -> None:
    if ctx.used:
        raise RuntimeError(
            "a second backward through the same experts: the first has overwritten the saved pre-activation with its "
            "gradient. Run the forward pass again, or choose the reference of expert_mlp, which keeps its inputs"
        )
    ctx.used = True


def tail_of(low_RL: Tensor | None, matrices: Matrices) -> Tail | None:
    if low_RL is None or matrices is None:
        return None
    return Tail(low_RL, matrices)


def inputs_times_a(
    source: Tensor,
    a_ELD: Matrices,
    scale: float,
    plan: Any,
    index_R: Tensor | None = None,
) -> Tensor | None:
    """s * x A^T of every row; None: there is no adapter."""
    from moefold.kernels.experts.low_rank_triton import narrow_rows

    if a_ELD is None:
        return None
    rows = len(source) if index_R is None else len(index_R)
    tiles = (plan.tiles_M4, plan.count)
    return narrow_rows(source, a_ELD, tiles, scale, True, rows, index_R)


def gradient_times_b(dy_RN: Tensor, b: Matrices, scale: float, plan: Any) -> Tensor | None:
    """s * dy B of every row."""
    from moefold.kernels.experts.low_rank_triton import narrow_rows

    if b is None:
        return None
    tiles = (plan.tiles_M4, plan.count)
    b_ENL = b.flatten(1, -2)
    return narrow_rows(dy_RN, b_ENL, tiles, scale, False, len(dy_RN))


def matrix_gradient(
    matrix: Matrices,
    wide: Tensor,
    low_RL: Tensor | None,
    ends_E: Tensor,
    by_row: bool = False,
    index_R: Tensor | None = None,
    starts_E: Tensor | None = None,
) -> Gradient:
    """The gradient of A (`by_row`) or of B, now or deferred."""
    if matrix is None or low_RL is None:
        return None
    compute = partial(write_matrix_gradient, matrix, wide, low_RL, ends_E, by_row, index_R, starts_E)
    return gradient_or_defer(matrix, compute)


def write_matrix_gradient(
    matrix: Tensor,
    wide: Tensor,
    low_RL: Tensor,
    ends_E: Tensor,
    by_row: bool,
    index_R: Tensor | None,
    starts_E: Tensor | None,
) -> Gradient:
    """None: the gradient was added, unrounded, to the sum in the matrix's sink."""
    from moefold.kernels.experts.low_rank_triton import sum_outer_products

    into = running_gradient_sum(matrix)
    is_added = into is not None
    out = memory_for_gradient(matrix) if into is None else into
    out_matrices = out.flatten(1, -2)
    sum_outer_products(wide, low_RL, out_matrices, ends_E, by_row, is_added, index_R, starts_E)
    return None if is_added else out
