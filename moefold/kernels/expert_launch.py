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
from moefold.kernels.row_kernels import gather, row_tiles

__all__ = ["Plan", "down", "down_data", "gather", "gathering", "summing", "up", "up_data", "weights"]

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


class Load(NamedTuple):
    """Rows that a product carries on the side: see expert_carry.py."""

    kind: str
    source: torch.Tensor
    index: torch.Tensor
    to: torch.Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Rows, and eighths of their width: the kernel then knows that rows begin at multiples of 16 bytes."""
        return len(self.to), self.to.shape[1] // 8


def gathering(source_ND: torch.Tensor, index_R: torch.Tensor) -> Load:
    return Load("gather", source_ND.contiguous(), index_R, source_ND.new_empty(len(index_R), source_ND.shape[1]))


def summing(y_RD: torch.Tensor, slots_NK: torch.Tensor) -> Load:
    return Load("sum", y_RD, slots_NK.contiguous(), y_RD.new_empty(len(slots_NK), y_RD.shape[1]))


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


def up_data(dh_Pf: torch.Tensor, w_E2FD: torch.Tensor, rows: int, plan: Plan, load: Load) -> torch.Tensor:
    e, _, f, d = w_E2FD.shape
    dx_RD = dh_Pf.new_empty(rows, d)
    b = block(w_E2FD.view(e * 2 * f, d), 64, WIDE)
    run("nn", "plain", dh_Pf, b, plain(dx_RD[None]), plan, n=d, k=2 * f, padded="a", load=load)
    return dx_RD


def weights(
    left: torch.Tensor,
    right: torch.Tensor,
    padded: str,
    like: torch.Tensor,
    plan: Plan,
    into: torch.Tensor | None = None,
    load: Load | None = None,
) -> torch.Tensor | None:
    """out[e] = left^T right over the rows of expert e, in the shape of the weights; zeros where it has none. One of the
    two, "a" or "b", is padded. Given `into`, fp32 or bf16, it is added to that instead, and nothing is returned."""
    m, n = left.shape[1], right.shape[1]
    out = torch.empty_like(like) if into is None else None
    ends = plain(out.view(-1, m, n)) if out is not None else Ends(None, into)
    end = "plain" if out is not None else "add"
    run("tn", end, left, block(right, 64, WIDE), ends, plan, m=m, n=n, padded=padded, load=load)
    return out


def plain(out: torch.Tensor) -> Ends:
    return Ends(planes(out), out)


def run(kind: str, end: str, a, b, ends: Ends, plan: Plan, m=0, n=0, k=0, h=None, padded="", load: Load | None = None):
    carried = (load.source, load.index, load.to, *load.size) if load else (None, None, None, 0, 0)
    turns = load.index.shape[1] if load and load.kind == "sum" else 1
    experts = len(plan.ends_E)
    expert_gemm[(processors(a.device.index or 0),)](
        block(a, 64, 64), b, h, *ends, plan.tiles_M4, plan.count, plan.ends_E, plan.pads_E,
        experts, m, n, k, len(a), group_of(experts), *carried,
        KIND=kind, END=end, PAD=padded, BN=WIDE, STAGES=STAGES, CARRY=load.kind if load else "", TURNS=turns,
        num_warps=4,
    )  # fmt: skip


def group_of(experts: int) -> int:
    """Rows of tiles walked together: as found best on an H200 for few large experts and for many small ones."""
    return 16 if experts <= 16 else 8


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
