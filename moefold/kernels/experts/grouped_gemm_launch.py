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
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.experts.epilogues_hopper import EpilogueOutputs
from moefold.kernels.experts.grouped_gemm_hopper import expert_gemm
from moefold.kernels.experts.tile_order import band_for_shape, gemm_shape_class
from moefold.kernels.hopper import block_descriptor
from moefold.kernels.routing.rows_triton import gather_padded, plan_row_tiles, sum_over_slots, zero_rows_behind
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
    "write_expert_wgrad",
    "zero_rows_behind",
]

TILE_COLUMNS = 256  # columns of a tile
STAGES = 3  # slabs of operands in flight; more leave no shared memory for a tile of results


class RowTilePlan(NamedTuple):
    """The routing as the kernels read it, on the device: ends of the experts' rows, row tiles and their number, and the
    padded starts."""

    ends_E: Tensor
    tiles_M4: Tensor
    count: Tensor
    pads_E: Tensor

    @classmethod
    def of(cls, ends_E: Tensor, rows: int) -> RowTilePlan:
        return cls(ends_E, *plan_row_tiles(ends_E, rows))


def gather_expert_rows(source_ND: Tensor, index_R: Tensor, plan: RowTilePlan) -> Tensor:
    """x_PD: the experts' rows, padded."""
    return gather_padded(source_ND, index_R, plan.tiles_M4, len(plan.ends_E))


def up_projection(x_PD: Tensor, w_E2FD: Tensor, weight_R: Tensor, plan: RowTilePlan):
    """The pre-activation h_R2F and the activation times the router's weight, a_RF."""
    e, _, f, d = w_E2FD.shape
    rows = len(weight_R)
    h_R2F = x_PD.new_empty(rows, 2, f)
    a_RF = x_PD.new_empty(rows, f)
    h_planes = plane_descriptor(h_R2F.transpose(0, 1))
    outputs = EpilogueOutputs(None, a_RF, h_planes, h_R2F, weight_R)
    # A tile has half its columns from the gate and half from up, so that the epilogue sees both.
    w_planes = w_E2FD.view(2 * e, f, d)
    b = block_descriptor(w_planes, 2, TILE_COLUMNS // 2, 64)
    launch_grouped_gemm("nt", "swiglu", x_PD, b, outputs, plan, n=2 * f, k=d)
    return h_R2F, a_RF


def down_projection(a_RF: Tensor, w_EDF: Tensor, plan: RowTilePlan) -> Tensor:
    e, d, f = w_EDF.shape
    y_RD = a_RF.new_empty(len(a_RF), d)
    outputs = plain_outputs(y_RD[None])
    w_NF = w_EDF.view(e * d, f)
    b = block_descriptor(w_NF, TILE_COLUMNS, 64)
    launch_grouped_gemm("nt", "plain", a_RF, b, outputs, plan, n=d, k=f)
    return y_RD


def down_projection_dgrad(dy_RD: Tensor, w_EDF: Tensor, h_R2F: Tensor, weight_R: Tensor, plan: RowTilePlan):
    """The activation once more, a_PF, and the gradient of the router's weight. The gradient of the pre-activation
    overwrites h_R2F."""
    e, d, f = w_EDF.shape
    rows = len(dy_RD)
    column_tiles = -(-f // TILE_COLUMNS)
    a_PF = h_R2F.new_empty(rows + 64 * e, f)
    dots_nR = dy_RD.new_empty(column_tiles, rows, dtype=torch.float32)  # a summand of each column tile
    outputs = EpilogueOutputs(None, h_R2F, None, a_PF, weight_R, dots_nR)
    w_NF = w_EDF.view(e * d, f)
    b = block_descriptor(w_NF, 64, TILE_COLUMNS)
    launch_grouped_gemm("nn", "dswiglu", dy_RD, b, outputs, plan, n=f, k=d)
    return a_PF, dots_nR.sum(0)


def up_projection_dgrad(dh_R2F: Tensor, w_E2FD: Tensor, plan: RowTilePlan) -> Tensor:
    e, _, f, d = w_E2FD.shape
    dx_RD = dh_R2F.new_empty(len(dh_R2F), d)
    outputs = plain_outputs(dx_RD[None])
    dh_RN = dh_R2F.flatten(1)
    w_ND = w_E2FD.view(e * 2 * f, d)
    b = block_descriptor(w_ND, 64, TILE_COLUMNS)
    launch_grouped_gemm("nn", "plain", dh_RN, b, outputs, plan, n=d, k=2 * f)
    return dx_RD


def expert_wgrad(
    left_RM: Tensor, right_PN: Tensor, like: Tensor, plan: RowTilePlan, into: Tensor | None = None
) -> Tensor | None:
    """out[e] = left^T right over the rows of expert e, in the shape of the weights; zeros for an expert without rows.
    Given `into`, fp32 or bf16, the gradient is added to that tensor, and None is returned."""
    add = into is not None
    out = into if add else memory_for_gradient(like)
    m = left_RM.shape[1]
    n = right_PN.shape[1]
    out_EMN = out.view(-1, m, n)
    write_expert_wgrad(left_RM, right_PN, out_EMN, plan, add)
    return None if add else out


def write_expert_wgrad(left_RM: Tensor, right_PN: Tensor, out_EMN: Tensor, plan: RowTilePlan, add: bool) -> None:
    _, m, n = out_EMN.shape
    b = block_descriptor(right_PN, 64, TILE_COLUMNS)
    if add:
        outputs = EpilogueOutputs(None, out_EMN)
        launch_grouped_gemm("tn", "add", left_RM, b, outputs, plan, m=m, n=n)
    else:
        outputs = plain_outputs(out_EMN)
        launch_grouped_gemm("tn", "plain", left_RM, b, outputs, plan, m=m, n=n)


def plain_outputs(out: Tensor) -> EpilogueOutputs:
    return EpilogueOutputs(plane_descriptor(out), out)


def launch_grouped_gemm(kind: str, end: str, a, b, outputs: EpilogueOutputs, plan: RowTilePlan, m=0, n=0, k=0) -> None:
    """`kind`: which operands are transposed, as in BLAS. `end`: the epilogue. m, n, k: sizes that are not rows."""
    experts = len(plan.ends_E)
    routing = (plan.tiles_M4, plan.count, plan.ends_E, plan.pads_E)
    a_desc = block_descriptor(a, 64, 64)
    tensors = (a_desc, b, *outputs, *routing)
    sizes = (experts, m, n, k, len(a))
    constants = {"KIND": kind, "END": end, "BN": TILE_COLUMNS, "STAGES": STAGES}
    programs = multiprocessor_count(a.device.index or 0)  # a persistent program on each

    def launch_with_band(band: int) -> None:
        expert_gemm[(programs,)](*tensors, *sizes, band, **constants, num_warps=4)

    timed_as = "plain" if end == "add" else end
    shape = gemm_shape_class(kind, timed_as, len(a), experts, n)
    overwrites_inputs = end in ("add", "dswiglu")  # cannot be launched repeatedly to be timed
    timed_launch = None if overwrites_inputs else launch_with_band
    band = band_for_shape(shape, a.device, timed_launch)
    launch_with_band(band)


def plane_descriptor(x: Tensor) -> TensorDescriptor:
    """A descriptor of (planes, rows, columns) in 64 x 64 blocks of one plane, as results are written."""
    return block_descriptor(x, 1, 64, 64)


@cache
def multiprocessor_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
