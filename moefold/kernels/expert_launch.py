"""The launches of the expert MLP's grouped GEMMs: descriptors, tile shapes and grids. Imported only where Triton is.

R rows in expert order, D width, F inner width, E experts.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.expert_gemm import expert_gemm
from moefold.kernels.row_kernels import gather, row_tiles, total

__all__ = ["Plan", "down", "down_data", "gather", "total", "up", "up_data", "weights"]

WIDE = 256  # columns of a tile
STAGES = 3  # steps of operands on their way; more leave no room for a tile of results


class Plan(NamedTuple):
    """What the kernels read about the routing, on the device."""

    ends_E: torch.Tensor
    tiles_M4: torch.Tensor
    count: torch.Tensor
    pads_E: torch.Tensor

    @classmethod
    def of(cls, ends_E: torch.Tensor, rows: int) -> Plan:
        return cls(ends_E, *row_tiles(ends_E, rows))


def up(x_RD: torch.Tensor, w_E2FD: torch.Tensor, weight_R: torch.Tensor, plan: Plan):
    """The pre-activation h_R2F and the activation times the router's weight, a_RF."""
    (rows, d), (e, _, f, _) = x_RD.shape, w_E2FD.shape
    h_R2F, a_RF = x_RD.new_empty(rows, 2 * f), x_RD.new_empty(rows, f)
    b = block(w_E2FD.view(2 * e, f, d), 2, WIDE // 2, 64)
    ends = (block(a_RF, 64, 64), a_RF, block(h_R2F, 64, 64), h_R2F, weight_R, weight_R)
    run("nt", "swiglu", x_RD, b, None, ends, plan, 0, 2 * f, d)
    return h_R2F, a_RF


def down(a_RF: torch.Tensor, w_EDF: torch.Tensor, plan: Plan) -> torch.Tensor:
    e, d, f = w_EDF.shape
    y_RD = a_RF.new_empty(len(a_RF), d)
    run("nt", "plain", a_RF, block(w_EDF.view(e * d, f), WIDE, 64), None, plain(y_RD), plan, 0, d, f)
    return y_RD


def down_data(dy_RD: torch.Tensor, w_EDF: torch.Tensor, h_R2F: torch.Tensor, weight_R: torch.Tensor, plan: Plan):
    """Gradients of the pre-activation and of the router's weight, and the activation again, from the gradient of y. The
    first and the last have P rows: padded with zeros to 64 for each expert."""
    e, d, f = w_EDF.shape
    rows = len(dy_RD)
    dh_P2F, a_PF = (h_R2F.new_empty(rows + 64 * e, width) for width in (2 * f, f))
    dots_nR = torch.empty(-(-f // WIDE), rows, dtype=torch.float32, device=dy_RD.device)
    ends = (block(dh_P2F, 64, 64), dh_P2F, block(a_PF, 64, 64), a_PF, weight_R, dots_nR)
    run("nn", "dswiglu", dy_RD, block(w_EDF.view(e * d, f), 64, WIDE), block(h_R2F, 64, 64), ends, plan, 0, f, d)
    return dh_P2F, a_PF, dots_nR.sum(0)


def up_data(dh_P2F: torch.Tensor, w_E2FD: torch.Tensor, rows: int, plan: Plan) -> torch.Tensor:
    e, _, f, d = w_E2FD.shape
    dx_RD = dh_P2F.new_empty(rows, d)
    run("nn", "plain", dh_P2F, block(w_E2FD.view(e * 2 * f, d), 64, WIDE), None, plain(dx_RD), plan, 0, d, 2 * f, "a")
    return dx_RD


def weights(left: torch.Tensor, right: torch.Tensor, padded: str, like: torch.Tensor, plan: Plan) -> torch.Tensor:
    """out[e] = left^T right over the rows of expert e, in the shape of the weights; zeros where it has none. One of the
    two, "a" or "b", is padded."""
    m, n = left.shape[1], right.shape[1]
    out = torch.empty_like(like)
    run("tn", "plain", left, block(right, 64, WIDE), None, plain(out.view(len(out) * m, n)), plan, m, n, 0, padded)
    return out


def plain(out: torch.Tensor):
    tile = block(out, 64, 64)
    return tile, out, tile, out, out, out


def run(kind: str, end: str, a, b, h, ends, plan: Plan, m: int, n: int, k: int, padded="") -> None:
    a_block = block(a, 64, 64)
    out, out_ptr, side, side_ptr, weight_R, dots_nR = ends
    expert_gemm[(processors(a.device.index or 0),)](
        a_block, b, h or a_block, out, out_ptr, side, side_ptr, weight_R, dots_nR,
        plan.tiles_M4, plan.count, plan.ends_E, plan.pads_E, len(plan.ends_E), m, n, k, len(a),
        group_of(len(plan.ends_E)),
        KIND=kind, END=end, PAD=padded, BN=WIDE, STAGES=STAGES, num_warps=4,
    )  # fmt: skip


def group_of(experts: int) -> int:
    """Rows of tiles walked together: as found best on an H200 for few large experts and for many small ones."""
    return 16 if experts <= 16 else 8


def block(x: torch.Tensor, *shape: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(shape), swizzled(shape))


@cache
def swizzled(shape: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)


@cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
