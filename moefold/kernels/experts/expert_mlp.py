"""The routed experts' MLP, rows in and rows out: gather, up and gate, SwiGLU times the router's weight, down.

N source rows, R rows in expert order, D width, F inner width, K rows at most per source row, E experts. Row r is
`source_ND[index_R[r]]`; expert e's rows end before `offsets_E[e]`.

    x_RD = source[index]     h_R2F = x W_gate_up     a_RF = silu(gate) * up * weight     y_RD = a W_down

The weight is inside, so y is linear in the activation behind it and y itself is not needed for any gradient:
d weight_r = (dy_r W_down) . silu(gate_r) * up_r.

A weight may have an attribute `gradient_sum`: a function that gives the tensor its gradients add up in, fp32 or bf16,
or None if there is none now. The fast implementation asks it in backward, adds to that tensor inside the product,
unrounded, and gives autograd no gradient for that weight; hooks that wait for one are called all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from moefold.kernels.experts.grouped_gemm import EXPERT_ROW_COUNTS, grouped_gemm
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.registry import KernelCase, register_op, seeded_randn
from moefold.kernels.routing.gather_rows import gather_rows, shuffled_rows


@register_op
def expert_mlp(
    source_ND: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    weight_R: torch.Tensor,
    index_R: torch.Tensor,
    slots_NK: torch.Tensor,
    ends_E: torch.Tensor,
    holes: bool = False,
) -> torch.Tensor:
    """y_RD: each row through its expert, times its weight."""
    x_RD = gather_rows(source_ND, index_R, slots_NK, holes)
    h_R2F = grouped_gemm(x_RD, gate_up_E2FD.flatten(1, 2), ends_E).unflatten(-1, (2, -1))
    return grouped_gemm(swiglu(h_R2F, weight_R), down_EDF, ends_E)


@expert_mlp.register_fast("gluon")
def _(source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E, holes=False) -> torch.Tensor:
    if not len(index_R):
        return expert_mlp.reference(source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E, holes)
    return ExpertMlpFunction.apply(source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E)  # pyright: ignore[reportReturnType]


class ExpertMlpFunction(torch.autograd.Function):
    """Keeps the source rows and the pre-activation; rows are gathered, and the activation made, a second time. The
    pre-activation's gradient takes its place: the largest of all that is alive then would be there twice."""

    @staticmethod
    def forward(ctx: Any, source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E):
        from moefold.kernels.experts import grouped_gemm_launch as launch

        plan = launch.RowTilePlan.of(ends_E, len(index_R))
        x_PD = launch.gather_expert_rows(source_ND, index_R, plan)
        h_R2F, a_RF = launch.up_projection(x_PD, gate_up_E2FD, weight_R.float(), plan)
        del x_PD
        ctx.weights, ctx.used = (gate_up_E2FD, down_EDF), False  # themselves: they know where their gradients go
        ctx.save_for_backward(source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, h_R2F, *plan)
        return launch.down_projection(a_RF, down_EDF, plan)

    @staticmethod
    def backward(ctx: Any, dy_RD):
        from moefold.kernels.experts import grouped_gemm_launch as launch

        source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, h_R2F, *plan = ctx.saved_tensors
        refuse_second_backward(ctx)
        plan = launch.RowTilePlan(*plan)
        gate_up, down = ctx.weights
        dy_RD = dy_RD.contiguous()
        a_PF, dweight_R = launch.down_projection_dgrad(dy_RD, down_EDF, h_R2F, weight_R.float(), plan)
        dh_R2F = h_R2F  # by now
        ddown_EDF = launch.expert_wgrad(dy_RD, a_PF, down, plan, running_gradient_sum(down))
        del a_PF
        dsource_ND = launch.sum_over_slots(launch.up_projection_dgrad(dh_R2F, gate_up_E2FD, plan), slots_NK)
        x_PD = launch.gather_expert_rows(source_ND, index_R, plan)
        dgate_up_E2FD = launch.expert_wgrad(dh_R2F.flatten(1), x_PD, gate_up, plan, running_gradient_sum(gate_up))
        return dsource_ND, dgate_up_E2FD, ddown_EDF, dweight_R.to(weight_R.dtype), None, None, None


def refuse_second_backward(ctx: Any) -> None:
    if ctx.used:
        raise RuntimeError(
            "a second backward through the same experts: the first has written gradients over the pre-activation it "
            "kept. Run the forward pass again, or choose the reference of expert_mlp, which keeps its inputs"
        )
    ctx.used = True


def running_gradient_sum(weight: torch.Tensor) -> torch.Tensor | None:
    """What the weight's gradients add up in, if they do already."""
    running = getattr(weight, "gradient_sum", None)
    return running() if running else None


def shuffled_routing(counts: list[int], k: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """An index, its slots and offsets for experts with so many rows, of k rows for each source row."""
    rows = sum(counts)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(rows))
    offsets = torch.tensor(counts).cumsum(0).int()
    return (order // k).to(device), slots.view(-1, k).to(device), offsets.to(device), False


@expert_mlp.register_cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    large = {
        "more than a tile": [130, 0, 63, 319],
        "all to one": [0, 0, 512, 0],
        "a tile and a half": [192, 64, 1, 127],
    }
    for name, counts in {**EXPERT_ROW_COUNTS, **large}.items():
        for d, f in [(16, 24), (128, 256)]:
            rows, k = sum(counts), 1 if sum(counts) % 2 else 2
            index, slots, offsets, holes = shuffled_routing(counts, k, device)
            source = seeded_randn(device, dtype, rows // k, d)
            gate_up = seeded_randn(device, dtype, len(counts), 2, f, d, seed=1, scale=d**-0.5)
            down = seeded_randn(device, dtype, len(counts), d, f, seed=2, scale=f**-0.5)
            weight = seeded_randn(device, wide, rows, seed=3).abs()
            inputs = (source, gate_up, down, weight, index, slots, offsets, holes)
            yield KernelCase(f"{name}, {d} by {f}", inputs, hidden=d, ffn=f)
    index, slots, holes = shuffled_rows(32, 4, device, drop=3)  # rows of padding, and choices that have no row
    ends = torch.tensor([len(index) // 3, len(index) // 3, len(index)], dtype=torch.int32, device=device)
    source, weight = seeded_randn(device, dtype, 32, 128), seeded_randn(device, wide, len(index), seed=3).abs()
    gate_up = seeded_randn(device, dtype, 3, 2, 256, 128, seed=1, scale=128**-0.5)
    down = seeded_randn(device, dtype, 3, 128, 256, seed=2, scale=256**-0.5)
    yield KernelCase("with holes", (source, gate_up, down, weight, index, slots, ends, holes), hidden=128, ffn=256)
