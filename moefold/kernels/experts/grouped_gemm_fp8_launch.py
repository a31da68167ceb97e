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

from moefold.config.precision_recipes import Sums
from moefold.kernels.experts.activation_formats import ActivationFormats
from moefold.kernels.experts.epilogues_fp8_hopper import Fp8Outputs
from moefold.kernels.experts.grouped_gemm_fp8_hopper import expert_gemm_fp8
from moefold.kernels.experts.grouped_gemm_launch import (
    RowTilePlan,
    multiprocessor_count,
    plane_descriptor,
    write_expert_wgrad,
)
from moefold.kernels.experts.tile_order import band_for_shape, gemm_shape_class
from moefold.kernels.quantise.fp8 import Quantised
from moefold.kernels.quantise.row_tiles import RowTiles

STAGES = 3
SCALE_ROWS = gl.NVMMASharedLayout(0, 32, 2)  # of scales, not swizzled


class ScaleArguments(NamedTuple):
    """Scales as the kernel takes them: tensors, descriptors of block scales, and steps of an expert and of a row."""

    a: Tensor
    b: Tensor
    a_desc: TensorDescriptor | None = None
    b_desc: TensorDescriptor | None = None
    a_expert: int = 0
    a_row: int = 0
    b_expert: int = 0
    b_row: int = 0


def launch_fp8_gemm(
    kind: str,
    end: str,
    a: Tensor,
    b: TensorDescriptor,
    scales: ScaleArguments,
    outputs: Fp8Outputs,
    tiles: RowTiles,
    sums: Sums,
    power_of_two: bool = False,
    m: int = 0,
    n: int = 0,
    k: int = 0,
) -> None:
    """`kind`: "rows" or "experts". `end`: the epilogue. m, n, k: sizes that are not rows."""
    experts = len(tiles.ends_E)
    routing = (tiles.tiles_M4, tiles.count, tiles.ends_E, tiles.first_tile_E)
    tile = (64, 128) if kind == "rows" else (1, 64, 128)
    a_desc = block_descriptor_fp8(a, *tile)
    tensors = (a_desc, b, *scales, *outputs, *routing)
    sizes = (experts, m, n, k, tiles.padded_rows)
    consumer_regs, other_regs = registers_of_warps(end, sums)
    constants = {
        "KIND": kind,
        "END": end,
        "SCALES": "wide" if scales.a_desc is None else "block",
        "PROMOTE": sums != "fast",
        "WIDE_B": "column" if scales.b_row else "expert",
        "POWER_OF_TWO": power_of_two,
        "STAGES": STAGES,
        "CONSUMER_REGS": consumer_regs,
        "OTHER_REGS": other_regs,
    }
    programs = multiprocessor_count(a.device.index or 0)  # a persistent program on each

    def launch_with_band(band: int) -> None:
        expert_gemm_fp8[(programs,)](*tensors, *sizes, band, **constants, num_warps=4)

    timed_as = "plain" if end == "add" else end
    most_rows = len(tiles.tiles_M4) * 128
    shape = gemm_shape_class("fp8 " + kind, timed_as, most_rows, experts, n)
    timed_launch = None if end == "add" else launch_with_band
    band = band_for_shape(shape, a.device, timed_launch)
    launch_with_band(band)


def registers_of_warps(end: str, sums: Sums) -> tuple[int, int]:
    """Registers of a consumer's thread, and of one of the other warps: 512 for two consumers and the others. Promotion
    needs sums twice; SwiGLU's epilogues need what it leaves."""
    if end in ("plain", "add"):
        return 224, 64
    if sums == "fast":
        return 184, 144
    return 208, 96


def block_descriptor_fp8(x: Tensor, *shape: int) -> TensorDescriptor:
    block = list(shape)
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    sizes = list(x.shape)
    strides = list(x.stride())
    return TensorDescriptor(x, sizes, strides, block, layout)


def scale_descriptor(scales: Tensor, columns: int) -> TensorDescriptor:
    """Block scales of the steps along K, (K / 128, rows), so many of one step at a time."""
    steps, rows = scales.shape
    strides = [rows, 1]  # torch gives a single step any stride
    return TensorDescriptor(scales, [steps, rows], strides, [1, columns], SCALE_ROWS)


def row_scales(a: Quantised, b: Quantised, sums: Sums) -> ScaleArguments:
    """Of products of rows with weights (E, N, K)."""
    _, outputs, steps = b.scales.shape
    if sums == "block":
        a_desc = scale_descriptor(a.scales.T, 128)
        b_expert = outputs * steps
        return ScaleArguments(a.scales, b.scales, a_desc, b_expert=b_expert, b_row=steps)
    by_channel = int(outputs > 1)
    return ScaleArguments(a.scales, b.scales, a_row=1, b_expert=outputs, b_row=by_channel)


def column_scales(a: Quantised, b: Quantised, sums: Sums) -> ScaleArguments:
    """Of weight gradients: scales (M, N, 1) of each tile. Wide ones are the same for all tiles of an expert."""
    a_scales = a.scales[..., 0]
    b_scales = b.scales[..., 0]
    if sums == "block":
        a_desc = scale_descriptor(a_scales, 128)
        b_desc = scale_descriptor(b_scales, 256)
        return ScaleArguments(a_scales, b_scales, a_desc, b_desc)
    m = a_scales.shape[1]
    n = b_scales.shape[1]
    return ScaleArguments(a_scales, b_scales, a_expert=m, a_row=1, b_expert=n, b_row=1)


def rows_by_weights(a: Quantised, b: Quantised, tiles: RowTiles, rows: int, sums: Sums) -> Tensor:
    """y_RN in bf16, without padding."""
    e, n, k = b.values.shape
    y_RN = torch.empty(rows, n, dtype=torch.bfloat16, device=a.values.device)
    if rows == 0:
        return y_RN
    planes = plane_descriptor(y_RN[None])
    outputs = Fp8Outputs(planes, y_RN)
    weights_NK = b.values.view(e * n, k)
    weights = block_descriptor_fp8(weights_NK, 256, 128)
    scales = row_scales(a, b, sums)
    launch_fp8_gemm("rows", "plain", a.values, weights, scales, outputs, tiles, sums, n=n, k=k)
    return y_RN


def swiglu_product(
    x: Quantised, w: Quantised, weight_R: Tensor, tiles: RowTiles, sums: Sums, formats: ActivationFormats
) -> tuple[Quantised | Tensor, Quantised | Tensor]:
    """h (P, 2F) and a (P, F), each as FP8 with scales of blocks or in bf16."""
    e, n, k = w.values.shape
    f = n // 2
    rows = tiles.padded_rows
    device = x.values.device
    h, h_scales = empty_blocks(rows, n, formats.fp8_kept, device)
    a, a_scales = empty_blocks(rows, f, formats.fp8_activation, device)
    outputs = Fp8Outputs(side_ptr=a, side_scales=a_scales, h_ptr=h, h_scales=h_scales, weight_R=weight_R)
    planes = w.values.view(2 * e, f, k)
    weights = block_descriptor_fp8(planes, 2, 128, 128)
    scales = row_scales(x, w, sums)
    power_of_two = formats.rule.power_of_two
    launch_fp8_gemm("rows", "swiglu", x.values, weights, scales, outputs, tiles, sums, power_of_two, n=n, k=k)
    return in_blocks(h, h_scales), in_blocks(a, a_scales)


def empty_blocks(rows: int, width: int, fp8: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Room for values, and for scales of 128 values, rows contiguous."""
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    values = torch.empty(rows, width, dtype=dtype, device=device)
    if not fp8:
        return values, None
    blocks = -(-width // 128)
    scales = torch.empty(blocks, rows, dtype=torch.float32, device=device)
    return values, scales


def in_blocks(values: Tensor, scales: Tensor | None) -> Quantised | Tensor:
    return values if scales is None else Quantised(values, scales.T)


def dswiglu_product(
    dy: Quantised, w: Quantised, h: Quantised | Tensor, weight_R: Tensor, tiles: RowTiles, sums: Sums
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the pre-activation (P, 2F) and the activation once more (P, F), both in bf16, and the gradient of
    the router's weights (R,)."""
    e, f, k = w.values.shape
    rows = tiles.padded_rows
    device = dy.values.device
    dh_PN, _ = empty_blocks(rows, 2 * f, False, device)
    a_PF, _ = empty_blocks(rows, f, False, device)
    column_tiles = -(-f // 256)
    dots_nP = torch.empty(column_tiles, rows, dtype=torch.float32, device=device)  # summands
    kept = h if isinstance(h, Quantised) else (h, None)
    outputs = Fp8Outputs(None, dh_PN, a_PF, None, *kept, weight_R, dots_nP)
    weights_NK = w.values.view(e * f, k)
    weights = block_descriptor_fp8(weights_NK, 256, 128)
    scales = row_scales(dy, w, sums)
    launch_fp8_gemm("rows", "dswiglu", dy.values, weights, scales, outputs, tiles, sums, n=f, k=k)
    real_dots = dots_nP[:, : len(weight_R)]
    return dh_PN, a_PF, real_dots.sum(0)


def columns_by_columns(
    dy: Quantised, x: Quantised, tiles: RowTiles, sums: Sums, out_END: Tensor, add: bool
) -> None:  # fmt: skip
    """out[e] = dy x^T over the rows of expert e; zeros for an expert without rows. `add`: to fp32 or bf16 `out`."""
    m = dy.values.shape[1]
    n = x.values.shape[1]
    b = block_descriptor_fp8(x.values, 1, 256, 128)
    end = "add" if add else "plain"
    planes = None if add else plane_descriptor(out_END)
    outputs = Fp8Outputs(planes, out_END)
    scales = column_scales(dy, x, sums)
    launch_fp8_gemm("experts", end, dy.values, b, scales, outputs, tiles, sums, m=m, n=n)


def tiles_by_tiles(dy_PN: Tensor, x_PD: Tensor, tiles: RowTiles, out_END: Tensor, add: bool) -> None:
    """The bf16 weight gradient of rows in tiles, by the bf16 kernel: all experts' rows are multiples of 128."""
    first_rows_E = tiles.first_tile_E * 128
    ends_E = torch.cat((first_rows_E[1:], tiles.count * 128))
    plan = RowTilePlan(ends_E, tiles.tiles_M4, tiles.count, first_rows_E)
    write_expert_wgrad(dy_PN, x_PD, out_END, plan, add)
