"""The launches of the expert MLP's grouped FP8 GEMMs: descriptors, scales and grids. Imported only where Triton is.

R rows in expert order, P in tiles of 128 (kernels/quantise/row_tiles.py), D width, F inner width, E experts.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.experts.grouped_gemm_fp8_hopper import expert_gemm_fp8
from moefold.kernels.experts.grouped_gemm_launch import multiprocessor_count, plane_descriptor
from moefold.kernels.experts.tile_order import band_for_shape, gemm_shape_class
from moefold.kernels.quantise.fp8 import Quantised
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.layout.gradient_sink import memory_for_gradient

STAGES = 3
SCALE_ROWS = gl.NVMMASharedLayout(0, 32, 2)  # of scales, not swizzled


class WideScales(NamedTuple):
    """Scales that are applied to the finished sums: that of expert e and row (column) r is at e * expert + r * row."""

    values: Tensor
    expert: int = 0
    row: int = 0


class Fp8Outputs(NamedTuple):
    """Where an epilogue writes. `side` and what follows belong to SwiGLU's epilogues."""

    out_desc: TensorDescriptor | None = None
    out: Tensor | None = None
    side: Tensor | None = None
    side_scales: Tensor | None = None
    h: Tensor | None = None
    h_scales: Tensor | None = None
    weight_R: Tensor | None = None
    dots_nP: Tensor | None = None


class ScaleArguments(NamedTuple):
    """As the kernel takes them: descriptors of block scales, and pointers with the steps of an expert and of a row."""

    a_desc: TensorDescriptor | None
    b_desc: TensorDescriptor | None
    a: Tensor
    a_expert: int
    a_row: int
    b: Tensor
    b_expert: int
    b_row: int


def launch_fp8_gemm(
    kind: str,
    end: str,
    a: Tensor,
    b: TensorDescriptor,
    scales: ScaleArguments,
    outputs: Fp8Outputs,
    tiles: RowTiles,
    promote: bool,
    power_of_two: bool = False,
    m: int = 0,
    n: int = 0,
    k: int = 0,
) -> None:
    """`kind`: "rows" or "experts". `end`: the epilogue. m, n, k: sizes that are not rows."""
    experts = len(tiles.ends_E)
    routing = (tiles.tiles_M4, tiles.count, tiles.ends_E, tiles.first_tile_E)
    tensors = (block_descriptor_fp8(a, 64, 128), b, *scales, *outputs, *routing)
    sizes = (experts, m, n, k, tiles.padded_rows)
    plain = end in ("plain", "add")
    constants = {
        "KIND": kind,
        "END": end,
        "SCALES": "wide" if scales.a_desc is None else "block",
        "PROMOTE": promote,
        "WIDE_B": "column" if scales.b_row else "expert",
        "POWER_OF_TWO": power_of_two,
        "STAGES": STAGES,
        "CONSUMER_REGS": 224 if plain else 216,
        "OTHER_REGS": 64 if plain else 80,
    }
    programs = multiprocessor_count(a.device.index or 0)  # a persistent program on each

    def launch_with_band(band: int) -> None:
        expert_gemm_fp8[(programs,)](*tensors, *sizes, band, **constants, num_warps=4)

    timed_as = "plain" if end == "add" else end
    shape = gemm_shape_class("fp8 " + kind, timed_as, len(tiles.tiles_M4) * 128, experts, n)
    timed_launch = None if end == "add" else launch_with_band
    launch_with_band(band_for_shape(shape, a.device, timed_launch))


def block_descriptor_fp8(x: Tensor, *shape: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.float8e4nv)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(shape), layout)


def scale_descriptor(scales: Tensor, columns: int) -> TensorDescriptor:
    """Block scales with the rows of the operand contiguous, (K / 128, rows), so many of one step at a time."""
    by_step = scales.T
    return TensorDescriptor(by_step, list(by_step.shape), list(by_step.stride()), [1, columns], SCALE_ROWS)


def row_scales(a: Quantised | WideScales, b: Quantised | WideScales) -> ScaleArguments:
    """Of products of rows with weights (E, N, K)."""
    if isinstance(a, Quantised):
        experts, blocks, steps = b.scales.shape
        desc = scale_descriptor(a.scales, 128)
        return ScaleArguments(desc, None, a.scales, 0, 0, b.scales, blocks * steps, steps)
    return wide_scale_arguments(a, b)


def expert_scales(a: Quantised | WideScales, b: Quantised | WideScales) -> ScaleArguments:
    """Of weight gradients."""
    if isinstance(a, Quantised):
        a_desc = scale_descriptor(a.scales, 128)
        b_desc = scale_descriptor(b.scales, 256)
        return ScaleArguments(a_desc, b_desc, a.scales, 0, 0, b.scales, 0, 0)
    return wide_scale_arguments(a, b)


def wide_scale_arguments(a: WideScales, b: WideScales) -> ScaleArguments:
    return ScaleArguments(None, None, *a, *b)


def fp8_rows_by_weights(
    x_PK: Tensor, w_ENK: Tensor, scales: ScaleArguments, tiles: RowTiles, rows: int, promote: bool
) -> Tensor:
    """y_RN in bf16, without padding."""
    e, n, k = w_ENK.shape
    y_RN = torch.empty(rows, n, dtype=torch.bfloat16, device=x_PK.device)
    outputs = Fp8Outputs(plane_descriptor(y_RN[None]), y_RN)
    b = block_descriptor_fp8(w_ENK.view(e * n, k), 256, 128)
    launch_fp8_gemm("rows", "plain", x_PK, b, scales, outputs, tiles, promote, n=n, k=k)
    return y_RN


def fp8_up_projection(
    x_PD: Tensor,
    w_ENK: Tensor,
    scales: ScaleArguments,
    weight_R: Tensor,
    tiles: RowTiles,
    promote: bool,
    quantise: bool,
    power_of_two: bool = False,
) -> tuple[Quantised, Quantised | Tensor]:
    """The pre-activation as FP8 (values (P, 2F), scales (P, 2F / 128)) and the activation: quantised by blocks, or in
    bf16."""
    e, n, k = w_ENK.shape
    f = n // 2
    p = tiles.padded_rows
    blocks = -(-f // 128)
    h = torch.empty(p, n, dtype=torch.float8_e4m3fn, device=x_PD.device)
    h_scales = torch.empty(2 * blocks, p, dtype=torch.float32, device=x_PD.device)
    a_dtype = torch.float8_e4m3fn if quantise else torch.bfloat16
    a = torch.empty(p, f, dtype=a_dtype, device=x_PD.device)
    a_scales = torch.empty(blocks, p, dtype=torch.float32, device=x_PD.device) if quantise else None
    outputs = Fp8Outputs(side=a, side_scales=a_scales, h=h, h_scales=h_scales, weight_R=weight_R)
    b = block_descriptor_fp8(w_ENK.view(2 * e, f, k), 2, 128, 128)
    launch_fp8_gemm("rows", "swiglu", x_PD, b, scales, outputs, tiles, promote, power_of_two, n=n, k=k)
    activation = Quantised(a, a_scales.T) if quantise else a
    return Quantised(h, h_scales.T), activation


def fp8_down_projection_dgrad(
    dy_PD: Tensor, w_EFD: Tensor, scales: ScaleArguments, h: Quantised, weight_R: Tensor, tiles: RowTiles, promote: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the pre-activation (P, 2F) and the activation once more (P, F), both in bf16, and the gradient of
    the router's weights (R,)."""
    e, f, k = w_EFD.shape
    p = tiles.padded_rows
    dh = torch.empty(p, 2 * f, dtype=torch.bfloat16, device=dy_PD.device)
    a = torch.empty(p, f, dtype=torch.bfloat16, device=dy_PD.device)
    column_tiles = -(-f // 256)
    dots_nP = torch.empty(column_tiles, p, dtype=torch.float32, device=dy_PD.device)  # a summand of each column tile
    outputs = Fp8Outputs(
        out=dh, side=a, h=h.values, h_scales=h.scales, weight_R=weight_R, dots_nP=dots_nP
    )  # fmt: skip
    b = block_descriptor_fp8(w_EFD.view(e * f, k), 256, 128)
    launch_fp8_gemm("rows", "dswiglu", dy_PD, b, scales, outputs, tiles, promote, n=f, k=k)
    return dh, a, dots_nP[:, : len(weight_R)].sum(0)


def fp8_expert_wgrad(
    left_MP: Tensor,
    right_NP: Tensor,
    scales: ScaleArguments,
    like: Tensor,
    tiles: RowTiles,
    promote: bool,
    into: Tensor | None = None,
) -> Tensor | None:
    """out[e] = left right^T over the rows of expert e, in the shape of the weights; zeros for an expert without rows.
    Given `into`, fp32 or bf16, the gradient is added to that tensor, and None is returned."""
    m = len(left_MP)
    n = len(right_NP)
    b = block_descriptor_fp8(right_NP, 256, 128)
    if into is not None:
        outputs = Fp8Outputs(out=into)
        launch_fp8_gemm("experts", "add", left_MP, b, scales, outputs, tiles, promote, m=m, n=n)
        return None
    out = memory_for_gradient(like)
    outputs = Fp8Outputs(plane_descriptor(out.view(-1, m, n)), out)
    launch_fp8_gemm("experts", "plain", left_MP, b, scales, outputs, tiles, promote, m=m, n=n)
    return out
