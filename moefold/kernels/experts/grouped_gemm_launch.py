"""The launches of the expert MLP's grouped GEMMs: descriptors, tile shapes and grids. Imported only where Triton is.

R rows in expert order, P with each expert's padded by zeros to a multiple of 64, D width, F inner width, E experts.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.experts.grouped_gemm_hopper import expert_gemm
from moefold.kernels.experts.tile_order import band_for_shape, gemm_shape_class
from moefold.kernels.hopper import block_descriptor
from moefold.kernels.routing.rows_triton import gather_padded, plan_row_tiles, sum_over_slots
from moefold.layout.gradient_sink import memory_for_gradient

__all__ = [
    "RowTilePlan",
    "down_projection",
    "down_projection_dgrad",
    "expert_wgrad",
    "gather_expert_rows",
    "sum_over_slots",
    "up_projection",
    "up_projection_dgrad",
]

TILE_COLUMNS = 256  # columns of a tile
STAGES = 3  # steps of operands on their way; more leave no room for a tile of results


class RowTilePlan(NamedTuple):
    """What the kernels read about the routing, on the device."""

    ends_E: torch.Tensor
    tiles_M4: torch.Tensor
    count: torch.Tensor
    pads_E: torch.Tensor

    @classmethod
    def of(cls, ends_E: torch.Tensor, rows: int) -> RowTilePlan:
        return cls(ends_E, *plan_row_tiles(ends_E, rows))


class EpilogueOutputs(NamedTuple):
    """Where results go, as the copy engine sees it and as a pointer; and what SwiGLU's epilogues read and write."""

    out: TensorDescriptor | None
    out_ptr: torch.Tensor
    side: TensorDescriptor | None = None
    side_ptr: torch.Tensor | None = None
    weight_R: torch.Tensor | None = None
    dots_nR: torch.Tensor | None = None


def gather_expert_rows(source_ND: torch.Tensor, index_R: torch.Tensor, plan: RowTilePlan) -> torch.Tensor:
    """x_PD: the experts' rows, padded."""
    return gather_padded(source_ND, index_R, plan.tiles_M4, len(plan.ends_E))


def up_projection(x_PD: torch.Tensor, w_E2FD: torch.Tensor, weight_R: torch.Tensor, plan: RowTilePlan):
    """The pre-activation h_R2F and the activation times the router's weight, a_RF."""
    rows, (e, _, f, d) = len(weight_R), w_E2FD.shape
    h_R2F, a_RF = x_PD.new_empty(rows, 2, f), x_PD.new_empty(rows, f)
    ends = EpilogueOutputs(None, a_RF, plane_descriptor(h_R2F.transpose(0, 1)), h_R2F, weight_R)
    launch_grouped_gemm(
        "nt",
        "swiglu",
        x_PD,
        block_descriptor(w_E2FD.view(2 * e, f, d), 2, TILE_COLUMNS // 2, 64),
        ends,
        plan,
        n=2 * f,
        k=d,
    )
    return h_R2F, a_RF


def down_projection(a_RF: torch.Tensor, w_EDF: torch.Tensor, plan: RowTilePlan) -> torch.Tensor:
    e, d, f = w_EDF.shape
    y_RD = a_RF.new_empty(len(a_RF), d)
    launch_grouped_gemm(
        "nt",
        "plain",
        a_RF,
        block_descriptor(w_EDF.view(e * d, f), TILE_COLUMNS, 64),
        plain_outputs(y_RD[None]),
        plan,
        n=d,
        k=f,
    )
    return y_RD


def down_projection_dgrad(
    dy_RD: torch.Tensor, w_EDF: torch.Tensor, h_R2F: torch.Tensor, weight_R: torch.Tensor, plan: RowTilePlan
):
    """From the gradient of y: that of the pre-activation, which takes its place; the activation again; and the gradient
    of the router's weight."""
    e, d, f = w_EDF.shape
    rows = len(dy_RD)
    a_PF = h_R2F.new_empty(rows + 64 * e, f)
    dots_nR = torch.empty(-(-f // TILE_COLUMNS), rows, dtype=torch.float32, device=dy_RD.device)
    ends = EpilogueOutputs(None, h_R2F, None, a_PF, weight_R, dots_nR)
    launch_grouped_gemm(
        "nn", "dswiglu", dy_RD, block_descriptor(w_EDF.view(e * d, f), 64, TILE_COLUMNS), ends, plan, n=f, k=d
    )
    return a_PF, dots_nR.sum(0)


def up_projection_dgrad(dh_R2F: torch.Tensor, w_E2FD: torch.Tensor, plan: RowTilePlan) -> torch.Tensor:
    e, _, f, d = w_E2FD.shape
    dx_RD = dh_R2F.new_empty(len(dh_R2F), d)
    b = block_descriptor(w_E2FD.view(e * 2 * f, d), 64, TILE_COLUMNS)
    launch_grouped_gemm("nn", "plain", dh_R2F.flatten(1), b, plain_outputs(dx_RD[None]), plan, n=d, k=2 * f)
    return dx_RD


def expert_wgrad(
    left_RM: torch.Tensor,
    right_PN: torch.Tensor,
    like: torch.Tensor,
    plan: RowTilePlan,
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """out[e] = left^T right over the rows of expert e, in the shape of the weights; zeros where it has none. Given
    `into`, fp32 or bf16, it is added to that instead, and nothing is returned."""
    m, n = left_RM.shape[1], right_PN.shape[1]
    out = memory_for_gradient(like) if into is None else None
    ends = plain_outputs(out.view(-1, m, n)) if out is not None else EpilogueOutputs(None, into)
    launch_grouped_gemm(
        "tn",
        "plain" if out is not None else "add",
        left_RM,
        block_descriptor(right_PN, 64, TILE_COLUMNS),
        ends,
        plan,
        m=m,
        n=n,
    )
    return out


def plain_outputs(out: torch.Tensor) -> EpilogueOutputs:
    return EpilogueOutputs(plane_descriptor(out), out)


def launch_grouped_gemm(kind: str, end: str, a, b, ends: EpilogueOutputs, plan: RowTilePlan, m=0, n=0, k=0) -> None:
    experts = len(plan.ends_E)
    operands = (block_descriptor(a, 64, 64), b, *ends, plan.tiles_M4, plan.count, plan.ends_E, plan.pads_E)

    def launch_with_band(band: int) -> None:
        expert_gemm[(multiprocessor_count(a.device.index or 0),)](
            *operands, experts, m, n, k, len(a), band, KIND=kind, END=end, BN=TILE_COLUMNS, STAGES=STAGES, num_warps=4
        )

    once = end in ("add", "dswiglu")  # they write over what they read
    shape = gemm_shape_class(kind, "plain" if end == "add" else end, len(a), experts, n)
    launch_with_band(band_for_shape(shape, a.device, None if once else launch_with_band))


def plane_descriptor(x: torch.Tensor) -> TensorDescriptor:
    """Of (planes, rows, columns), as results are written: 64 rows and columns of one plane."""
    return block_descriptor(x, 1, 64, 64)


@cache
def multiprocessor_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
