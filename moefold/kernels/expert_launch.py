"""The launches of the expert MLP's grouped GEMMs: descriptors, tile shapes and grids. Imported only where Triton is.

R rows in expert order, D width, F inner width, E experts, P rows with each expert's padded to a multiple of 64.
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
from moefold.kernels.tile_order import band_for, shape_of
from moefold.layout.landing import memory_for_gradient

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


class Ends(NamedTuple):
    """Where results go, as the copy engine sees it and as a pointer; and what SwiGLU's epilogues read and write."""

    out: TensorDescriptor | None
    out_ptr: torch.Tensor
    side: TensorDescriptor | None = None
    side_ptr: torch.Tensor | None = None
    weight_R: torch.Tensor | None = None
    dots_nR: torch.Tensor | None = None


def up(x_RD: torch.Tensor, w_E2FD: torch.Tensor, weight_R: torch.Tensor, plan: Plan):
    """The pre-activation h_R2F and the activation times the router's weight, a_RF."""
    (rows, d), (e, _, f, _) = x_RD.shape, w_E2FD.shape
    h_R2F, a_RF = x_RD.new_empty(rows, 2, f), x_RD.new_empty(rows, f)
    ends = Ends(planes(a_RF[None]), a_RF, planes(h_R2F.transpose(0, 1)), h_R2F, weight_R)
    run("nt", "swiglu", x_RD, block(w_E2FD.view(2 * e, f, d), 2, WIDE // 2, 64), ends, plan, n=2 * f, k=d)
    return h_R2F, a_RF


def down(a_RF: torch.Tensor, w_EDF: torch.Tensor, plan: Plan) -> torch.Tensor:
    e, d, f = w_EDF.shape
    y_RD = a_RF.new_empty(len(a_RF), d)
    run("nt", "plain", a_RF, block(w_EDF.view(e * d, f), WIDE, 64), plain(y_RD[None]), plan, n=d, k=f)
    return y_RD


def down_data(dy_RD: torch.Tensor, w_EDF: torch.Tensor, h_R2F: torch.Tensor, weight_R: torch.Tensor, plan: Plan):
    """Gradients of the pre-activation and of the router's weight, and the activation again, from the gradient of y. The
    first and the last have P rows: padded with zeros to 64 for each expert."""
    e, d, f = w_EDF.shape
    rows = len(dy_RD)
    dh_P2F, a_PF = h_R2F.new_empty(rows + 64 * e, 2, f), h_R2F.new_empty(rows + 64 * e, f)
    dots_nR = torch.empty(-(-f // WIDE), rows, dtype=torch.float32, device=dy_RD.device)
    ends = Ends(planes(dh_P2F.transpose(0, 1)), dh_P2F, planes(a_PF[None]), a_PF, weight_R, dots_nR)
    h = planes(h_R2F.transpose(0, 1))
    run("nn", "dswiglu", dy_RD, block(w_EDF.view(e * d, f), 64, WIDE), ends, plan, n=f, k=d, h=h)
    return dh_P2F.flatten(1), a_PF, dots_nR.sum(0)


def up_data(dh_Pf: torch.Tensor, w_E2FD: torch.Tensor, rows: int, plan: Plan) -> torch.Tensor:
    e, _, f, d = w_E2FD.shape
    dx_RD = dh_Pf.new_empty(rows, d)
    b = block(w_E2FD.view(e * 2 * f, d), 64, WIDE)
    run("nn", "plain", dh_Pf, b, plain(dx_RD[None]), plan, n=d, k=2 * f, padded="a")
    return dx_RD


def weights(
    left: torch.Tensor,
    right: torch.Tensor,
    padded: str,
    like: torch.Tensor,
    plan: Plan,
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """out[e] = left^T right over the rows of expert e, in the shape of the weights; zeros where it has none. One of the
    two, "a" or "b", is padded. Given `into`, fp32 or bf16, it is added to that instead, and nothing is returned."""
    m, n = left.shape[1], right.shape[1]
    out = memory_for_gradient(like) if into is None else None
    ends = plain(out.view(-1, m, n)) if out is not None else Ends(None, into)
    end = "plain" if out is not None else "add"
    run("tn", end, left, block(right, 64, WIDE), ends, plan, m=m, n=n, padded=padded)
    return out


def plain(out: torch.Tensor) -> Ends:
    return Ends(planes(out), out)


def run(kind: str, end: str, a, b, ends: Ends, plan: Plan, m=0, n=0, k=0, h=None, padded="") -> None:
    experts = len(plan.ends_E)
    operands = (block(a, 64, 64), b, h, *ends, plan.tiles_M4, plan.count, plan.ends_E, plan.pads_E)

    def launch(band: int) -> None:
        expert_gemm[(processors(a.device.index or 0),)](
            *operands, experts, m, n, k, len(a), band,
            KIND=kind, END=end, PAD=padded, BN=WIDE, STAGES=STAGES, num_warps=4,
        )  # fmt: skip

    shape = shape_of(kind, "plain" if end == "add" else end, len(a), experts, n)
    launch(band_for(shape, a.device, launch if end != "add" else None))


def planes(x: torch.Tensor) -> TensorDescriptor:
    """Of (planes, rows, columns), as results are written: 64 rows and columns of one plane."""
    return block(x, 1, 64, 64)


def block(x: torch.Tensor, *shape: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(shape), swizzled(shape))


@cache
def swizzled(shape: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)


@cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
