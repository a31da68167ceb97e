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


class Fp8Operands(NamedTuple):
    """What a product reads: both operands, their scales, and how sums are taken."""

    a: Tensor
    b: TensorDescriptor
    scales: ScaleArguments
    sums: Sums


def launch_fp8_gemm(
    kind: str,
    end: str,
    operands: Fp8Operands,
    outputs: Fp8Outputs,
    tiles: RowTiles,
    power_of_two: bool = False,
    m: int = 0,
    n: int = 0,
    k: int = 0,
) -> None:
    """`kind`: "rows" or "experts". `end`: the epilogue. m, n, k: sizes that are not rows."""
    a, b, scales, sums = operands
    ends_E, tiles_M4, count, first_tile_E = tiles
    routing = (tiles_M4, count, ends_E, first_tile_E)
    planes = () if kind == "rows" else (1,)
    a_desc = block_descriptor_fp8(a, *planes, 64, 128)
    tensors = (a_desc, b, *scales, *outputs, *routing)
    experts = len(ends_E)
    padded = tiles.padded_rows
    sizes = (experts, m, n, k, padded)
    by_block = scales.a_desc is not None
    by_column = scales.b_row > 0
    consumer_regs, other_regs = registers_of_warps(end, sums)
    constants = {
        "KIND": kind,
        "END": end,
        "SCALES": "block" if by_block else "wide",
        "PROMOTE": sums != "fast",
        "WIDE_B": "column" if by_column else "expert",
        "POWER_OF_TWO": power_of_two,
        "STAGES": STAGES,
        "CONSUMER_REGS": consumer_regs,
        "OTHER_REGS": other_regs,
    }
    device = a.device
    programs = multiprocessor_count(device.index or 0)  # a persistent program on each
    launch = expert_gemm_fp8[(programs,)]

    def launch_with_band(band: int) -> None:
        launch(*tensors, *sizes, band, **constants, num_warps=4)

    timed_as = "plain" if end == "add" else end
    contraction = f"fp8 {kind}"
    shape = gemm_shape_class(contraction, timed_as, padded, experts, n)
    timed_launch = None if end == "add" else launch_with_band
    band = band_for_shape(shape, device, timed_launch)
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
    find_layout = gl.NVMMASharedLayout.get_default_for
    layout = find_layout(block, gl.float8e4nv)
    sizes = list(x.shape)
    strides = list(x.stride())
    return TensorDescriptor(x, sizes, strides, block, layout)


def scale_descriptor(scales: Tensor, columns: int) -> TensorDescriptor:
    """Block scales of the steps along K, (K / 128, rows), so many of one step at a time."""
    sizes = list(scales.shape)
    strides = [sizes[1], 1]  # torch gives a single step any stride
    block = [1, columns]
    return TensorDescriptor(scales, sizes, strides, block, SCALE_ROWS)


def row_scales(a: Quantised, b: Quantised, sums: Sums) -> ScaleArguments:
    """Of products of rows with weights (E, N, K)."""
    both = (a.scales, b.scales)
    _, outputs, steps = b.scales.shape
    if sums == "block":
        a_desc = scale_descriptor(a.scales.T, 128)
        b_expert = outputs * steps
        return ScaleArguments(*both, a_desc, b_expert=b_expert, b_row=steps)
    by_channel = int(outputs > 1)
    return ScaleArguments(*both, a_row=1, b_expert=outputs, b_row=by_channel)


def column_scales(a: Quantised, b: Quantised, sums: Sums) -> ScaleArguments:
    """Of weight gradients: scales (M, N, 1) of each tile. Wide ones are the same for all tiles of an expert."""
    a_scales = a.scales[..., 0]
    b_scales = b.scales[..., 0]
    both = (a_scales, b_scales)
    if sums == "block":
        a_desc = scale_descriptor(a_scales, 128)
        b_desc = scale_descriptor(b_scales, 256)
        return ScaleArguments(*both, a_desc, b_desc)
    m = a_scales.shape[1]
    n = b_scales.shape[1]
    return ScaleArguments(*both, a_expert=m, a_row=1, b_expert=n, b_row=1)


def rows_by_weights(a: Quantised, b: Quantised, tiles: RowTiles, rows: int, sums: Sums) -> Tensor:
    """y_RN in bf16, without padding."""
    _, n, k = b.values.shape
    y_RN = empty_bf16(a, rows, n)
    if rows == 0:
        return y_RN
    y_1RN = y_RN[None]
    planes = plane_descriptor(y_1RN)
    outputs = Fp8Outputs(planes, y_RN)
    operands = row_operands(a, b, sums)
    launch_fp8_gemm("rows", "plain", operands, outputs, tiles, n=n, k=k)
    return y_RN


def empty_bf16(like: Quantised, rows: int, width: int) -> Tensor:
    return like.values.new_empty(rows, width, dtype=torch.bfloat16)


def row_operands(a: Quantised, w: Quantised, sums: Sums) -> Fp8Operands:
    """Rows (P, K) and weights (E, N, K) in tiles of 256 outputs."""
    w_NK = w.values.flatten(0, 1)
    b = block_descriptor_fp8(w_NK, 256, 128)
    scales = row_scales(a, w, sums)
    return Fp8Operands(a.values, b, scales, sums)


def swiglu_product(
    x: Quantised,
    w: Quantised,
    weight_R: Tensor,
    tiles: RowTiles,
    sums: Sums,
    formats: ActivationFormats,
    a_rows_E1: Tensor | None = None,
) -> tuple[Quantised | Tensor, Quantised | Tensor]:
    """h (P, 2F) and a (P, F), each as FP8 with scales of blocks or in bf16; a as FP8 with given scales of experts."""
    _, n, k = w.values.shape
    f = n // 2
    rows = tiles.padded_rows
    h = empty_blocks(x, rows, n) if formats.fp8_kept else empty_bf16(x, rows, n)
    if a_rows_E1 is not None:
        a = empty_rows(x, rows, f, formats)
    else:
        a = empty_blocks(x, rows, f) if formats.fp8_activation else empty_bf16(x, rows, f)
    a_tensors = values_and_scales(a)
    h_tensors = values_and_scales(h)
    outputs = Fp8Outputs(None, None, *a_tensors, *h_tensors, weight_R, side_rows_E=a_rows_E1)
    # A tile has half its columns from the gate and half from up, so that the epilogue sees both.
    w_planes = w.values.view(-1, f, k)
    b = block_descriptor_fp8(w_planes, 2, 128, 128)
    operands = row_operands(x, w, sums)._replace(b=b)
    power_of_two = formats.rule.power_of_two
    launch_fp8_gemm("rows", "swiglu", operands, outputs, tiles, power_of_two, n=n, k=k)
    return h, a


def empty_blocks(like: Quantised, rows: int, width: int) -> Quantised:
    """Room for FP8 values, and for scales of 128 values, which lie by block."""
    blocks = -(-width // 128)
    values = like.values.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = like.scales.new_empty(blocks, rows, dtype=torch.float32)
    return Quantised(values, scales.T)


def empty_rows(like: Quantised, rows: int, width: int, formats: ActivationFormats) -> Quantised:
    """Room for FP8 values, and for a scale of each row."""
    values = like.values.new_empty(rows, width, dtype=formats.rule.format.dtype)
    scales = like.scales.new_empty(rows, 1, dtype=torch.float32)
    return Quantised(values, scales)


def values_and_scales(x: Quantised | Tensor) -> tuple[Tensor, Tensor | None]:
    return (x, None) if isinstance(x, Tensor) else x


def dswiglu_product(
    dy: Quantised,
    w: Quantised,
    h: Quantised | Tensor,
    weight_R: Tensor,
    tiles: RowTiles,
    sums: Sums,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the pre-activation (P, 2F) and the activation once more (P, F), both in bf16, and the gradient of
    the router's weights (R,)."""
    _, f, k = w.values.shape
    rows = tiles.padded_rows
    dh_PN = empty_bf16(dy, rows, 2 * f)
    a_PF = empty_bf16(dy, rows, f)
    column_tiles = -(-f // 256)
    dots_nP = dy.scales.new_empty(column_tiles, rows, dtype=torch.float32)  # summands
    h_tensors = values_and_scales(h)
    outputs = Fp8Outputs(None, dh_PN, a_PF, None, *h_tensors, weight_R, dots_nP)
    operands = row_operands(dy, w, sums)
    launch_fp8_gemm("rows", "dswiglu", operands, outputs, tiles, n=f, k=k)
    real_rows = len(weight_R)
    real_dots = dots_nP[:, :real_rows]
    return dh_PN, a_PF, real_dots.sum(0)


def columns_by_columns(
    dy: Quantised,
    x: Quantised,
    tiles: RowTiles,
    sums: Sums,
    out_END: Tensor,
    add: bool,
) -> None:
    """out[e] = dy x^T over the rows of expert e; zeros for an expert without rows. `add`: to fp32 or bf16 `out`."""
    m = dy.values.shape[1]
    n = x.values.shape[1]
    b = block_descriptor_fp8(x.values, 1, 256, 128)
    end = "add" if add else "plain"
    planes = None if add else plane_descriptor(out_END)
    outputs = Fp8Outputs(planes, out_END)
    scales = column_scales(dy, x, sums)
    operands = Fp8Operands(dy.values, b, scales, sums)
    launch_fp8_gemm("experts", end, operands, outputs, tiles, m=m, n=n)


def tiles_by_tiles(dy_PN: Tensor, x_PD: Tensor, tiles: RowTiles, out_END: Tensor, add: bool) -> None:
    """The bf16 weight gradient of rows in tiles, by the bf16 kernel: all experts' rows are multiples of 128."""
    first_rows_E = tiles.first_tile_E * 128
    last_end = tiles.count * 128
    ends_E = torch.cat((first_rows_E[1:], last_end))
    plan = RowTilePlan(ends_E, tiles.tiles_M4, tiles.count, first_rows_E)
    write_expert_wgrad(dy_PN, x_PD, out_END, plan, add)
