"""The launches of the expert MLP's grouped GEMMs: descriptors, tile shapes and grids. Imported only where Triton is.

R rows in expert order, P with each expert's padded by zeros to a multiple of 64, D width, F inner width, E experts.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.experts.epilogues_hopper import EpilogueOutputs
from moefold.kernels.experts.frozen_weights import Tail, Weights
from moefold.kernels.experts.grouped_gemm_hopper import expert_gemm
from moefold.kernels.experts.tile_order import band_for_shape, gemm_shape_class
from moefold.kernels.hopper import block_descriptor
from moefold.kernels.routing.rows_triton import (
    gather_padded,
    plan_parts,
    plan_row_tiles,
    sum_over_slots,
    zero_rows_behind,
)
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
        tiles = plan_row_tiles(ends_E, rows)
        return cls(ends_E, *tiles)


class PartOfWeights(NamedTuple):
    """Weights of the experts from `first` on, and the tiles of their rows."""

    first: int
    weights: Tensor
    plan: RowTilePlan


def parts_of_weights(weights: Weights, plan: RowTilePlan, rows: int) -> Iterator[PartOfWeights]:
    """The parts in turn. A caller that drops a part before the next is made has the memory of one."""
    if isinstance(weights, Tensor):
        yield PartOfWeights(0, weights, plan)
        return
    experts = len(plan.ends_E)
    tiles_CM4, count_C = plan_parts(plan.ends_E, rows, weights.experts)
    for number, first in enumerate(range(0, experts, weights.experts)):
        last = min(experts, first + weights.experts)
        one = slice(number, number + 1)
        part = plan._replace(tiles_M4=tiles_CM4[number], count=count_C[one])
        yield PartOfWeights(first, weights.load(slice(first, last)), part)


def gather_expert_rows(source_ND: Tensor, index_R: Tensor, plan: RowTilePlan) -> Tensor:
    """x_PD: the experts' rows, padded."""
    experts = len(plan.ends_E)
    return gather_padded(source_ND, index_R, plan.tiles_M4, plan.count, experts)


def up_projection(x_PD: Tensor, w_E2FD: Weights, weight_R: Tensor, plan: RowTilePlan, tail: Tail | None = None):
    """The pre-activation h_R2F and the activation times the router's weight, a_RF."""
    _, _, f, d = w_E2FD.shape
    width = 2 * f
    rows = len(weight_R)
    h_R2F = x_PD.new_empty(rows, 2, f)
    a_RF = x_PD.new_empty(rows, f)
    h_2RF = h_R2F.transpose(0, 1)
    h_planes = plane_descriptor(h_2RF)
    outputs = EpilogueOutputs(None, a_RF, h_planes, h_R2F, weight_R)
    gemm = GroupedGemm("nt", "swiglu", n=width, k=d)
    for part in parts_of_weights(w_E2FD, plan, rows):
        launch_part(gemm, x_PD, gate_up_descriptor, part, outputs, tail)
        del part  # its memory is that of the next
    return h_R2F, a_RF


def down_projection(a_RF: Tensor, w_EDF: Weights, plan: RowTilePlan, tail: Tail | None = None) -> Tensor:
    _, d, f = w_EDF.shape
    rows = len(a_RF)
    y_RD = a_RF.new_empty(rows, d)
    outputs = plain_outputs(y_RD[None])
    gemm = GroupedGemm("nt", "plain", n=d, k=f)
    for part in parts_of_weights(w_EDF, plan, rows):
        launch_part(gemm, a_RF, by_row_descriptor, part, outputs, tail)
        del part  # its memory is that of the next
    return y_RD


def down_projection_dgrad(
    dy_RD: Tensor,
    w_EDF: Weights,
    h_R2F: Tensor,
    weight_R: Tensor,
    plan: RowTilePlan,
    tail: Tail | None = None,
):
    """The activation once more, a_PF, and the gradient of the router's weight. The gradient of the pre-activation
    overwrites h_R2F."""
    e, d, f = w_EDF.shape
    rows = len(dy_RD)
    most_rows = rows + 64 * e
    column_tiles = -(-f // TILE_COLUMNS)
    a_PF = h_R2F.new_empty(most_rows, f)
    dots_nR = dy_RD.new_empty(column_tiles, rows, dtype=torch.float32)  # a summand of each column tile
    outputs = EpilogueOutputs(None, h_R2F, None, a_PF, weight_R, dots_nR)
    gemm = GroupedGemm("nn", "dswiglu", n=f, k=d)
    for part in parts_of_weights(w_EDF, plan, rows):
        launch_part(gemm, dy_RD, by_column_descriptor, part, outputs, tail)
        del part  # its memory is that of the next
    return a_PF, dots_nR.sum(0)


def up_projection_dgrad(dh_R2F: Tensor, w_E2FD: Weights, plan: RowTilePlan, tail: Tail | None = None) -> Tensor:
    d = w_E2FD.shape[-1]
    dh_RN = dh_R2F.flatten(1)
    rows, width = dh_RN.shape
    dx_RD = dh_R2F.new_empty(rows, d)
    outputs = plain_outputs(dx_RD[None])
    gemm = GroupedGemm("nn", "plain", n=d, k=width)
    for part in parts_of_weights(w_E2FD, plan, rows):
        launch_part(gemm, dh_RN, by_column_descriptor, part, outputs, tail)
        del part  # its memory is that of the next
    return dx_RD


# Right operands, of weights and of a tail's matrices alike.


def gate_up_descriptor(w_E2FD: Tensor) -> TensorDescriptor:
    """A tile has half its columns from the gate and half from up, so that the epilogue sees both."""
    w_planes = w_E2FD.flatten(0, 1)
    half_columns = TILE_COLUMNS // 2
    return block_descriptor(w_planes, 2, half_columns, 64)


def by_row_descriptor(w_END: Tensor) -> TensorDescriptor:
    w_ND = w_END.flatten(0, -2)
    return block_descriptor(w_ND, TILE_COLUMNS, 64)


def by_column_descriptor(w_EDN: Tensor) -> TensorDescriptor:
    w_DN = w_EDN.flatten(0, -2)
    return block_descriptor(w_DN, 64, TILE_COLUMNS)


def launch_part(
    gemm: GroupedGemm,
    a: Tensor,
    describe: Callable[[Tensor], TensorDescriptor],
    part: PartOfWeights,
    outputs: EpilogueOutputs,
    tail: Tail | None,
) -> None:
    b = describe(part.weights)
    of_tail = NO_TAIL
    if tail is not None:
        low = block_descriptor(tail.low_RL, 64, 64)
        depth = tail.low_RL.shape[1]
        of_tail = TailOperands(low, describe(tail.matrices), depth)
    launch_grouped_gemm(gemm, a, b, outputs, part.plan, of_tail, part.first)


def expert_wgrad(
    left_RM: Tensor,
    right_PN: Tensor,
    like: Tensor,
    plan: RowTilePlan,
    into: Tensor | None = None,
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
        end = "add"
        outputs = EpilogueOutputs(None, out_EMN)
    else:
        end = "plain"
        outputs = plain_outputs(out_EMN)
    gemm = GroupedGemm("tn", end, m=m, n=n)
    launch_grouped_gemm(gemm, left_RM, b, outputs, plan)


def plain_outputs(out: Tensor) -> EpilogueOutputs:
    planes = plane_descriptor(out)
    return EpilogueOutputs(planes, out)


class GroupedGemm(NamedTuple):
    """`kind`: which operands are transposed, as in BLAS. `end`: the epilogue. m, n, k: sizes that are not rows."""

    kind: str
    end: str
    m: int = 0
    n: int = 0
    k: int = 0


class TailOperands(NamedTuple):
    """Operands of a tail, and its depth."""

    low_desc: TensorDescriptor | None
    tail_desc: TensorDescriptor | None
    depth: int


NO_TAIL = TailOperands(None, None, 0)


def launch_grouped_gemm(
    gemm: GroupedGemm,
    a,
    b,
    outputs: EpilogueOutputs,
    plan: RowTilePlan,
    tail: TailOperands = NO_TAIL,
    first: int = 0,
) -> None:
    """`first`: the expert whose weights b begins with."""
    kind, end, m, n, k = gemm
    ends_E, tiles_M4, count, pads_E = plan
    routing = (tiles_M4, count, ends_E, pads_E)
    a_desc = block_descriptor(a, 64, 64)
    low, tail_b, depth = tail
    tensors = (a_desc, b, low, tail_b, *outputs, *routing)
    experts = len(ends_E)
    rows = len(a)
    sizes = (experts, m, n, k, rows)
    constants = {"KIND": kind, "END": end, "BN": TILE_COLUMNS, "STAGES": STAGES}
    device = a.device
    programs = multiprocessor_count(device.index or 0)  # a persistent program on each
    launch = expert_gemm[(programs,)]

    def launch_with_band(band: int) -> None:
        launch(*tensors, *sizes, band, depth, first, **constants, num_warps=4)

    timed_as = "plain" if end == "add" else end
    shape = gemm_shape_class(kind, timed_as, rows, experts, n)
    overwrites_inputs = end in ("add", "dswiglu")  # cannot be launched repeatedly to be timed
    timed_launch = None if overwrites_inputs else launch_with_band
    band = band_for_shape(shape, device, timed_launch)
    launch_with_band(band)


def plane_descriptor(x: Tensor) -> TensorDescriptor:
    """A descriptor of (planes, rows, columns) in 64 x 64 blocks of one plane, as results are written."""
    return block_descriptor(x, 1, 64, 64)


@cache
def multiprocessor_count(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count
