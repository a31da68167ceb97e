"""Products of Newton-Schulz in Gram form for Hopper: symmetric ones by symmetric_product_hopper.py, of which tiles
above the diagonal are neither computed nor stored, and products with X by the grouped GEMM of experts, a matrix an
expert. Imported only where Triton is."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.experts.grouped_gemm_launch import (
    TILE_COLUMNS,
    GroupedGemm,
    RowTilePlan,
    launch_grouped_gemm,
    multiprocessor_count,
    plain_outputs,
)
from moefold.kernels.hopper import block_descriptor
from moefold.kernels.optimizer.gram_steps import Step, WholeForm, is_tall, symmetric
from moefold.kernels.optimizer.matrix_norms_triton import inverse_norms
from moefold.kernels.optimizer.symmetric_product_hopper import DEPTH, HALF_ROWS, TILE, symmetric_product

ALIGNED = 8  # elements: rows begin at multiples of 16 bytes, as TMA needs
STEP_DEPTH = 64  # of the grouped GEMM: the last step of a matrix must not read the next one, which may hold NaN
STAGES = 3  # of operands in flight; more leave no shared memory for a tile of results


class ProductEnd(NamedTuple):
    """What becomes of a symmetric product: its factor, and one of each matrix; a matrix to add, and its factor; what is
    added on the diagonal; whether tiles above the diagonal are stored."""

    alpha: float = 1.0
    scales_N: Tensor | None = None
    add_NRR: Tensor | None = None
    beta: float = 0.0
    diagonal: float = 0.0
    mirrors: bool = False


class HopperProducts:
    """Products of `gram_steps`, in kernels."""

    def __init__(self, device: torch.device):
        self.batch = multiprocessor_count(device.index or 0)  # of so many matrices a program gets each tile once

    def aligned(self, x: Tensor) -> Tensor:
        _, rows, columns = x.shape
        if is_tall(x):
            aligned_columns, aligned_rows = aligned_sides(columns, rows)
        else:
            aligned_rows, aligned_columns = aligned_sides(rows, columns)
        more_columns = aligned_columns - columns
        more_rows = aligned_rows - rows
        if more_columns or more_rows:
            x = pad(x, (0, more_columns, 0, more_rows))
        return x.contiguous()

    def inverse_norms(self, x: Tensor, least_norm: float) -> Tensor:
        return inverse_norms(x, least_norm)

    def gram(self, x: Tensor, scales_N: Tensor | None) -> Tensor:
        count, *sides = x.shape
        form = "columns" if is_tall(x) else "rows"
        out = fp16_squares(count, min(sides), x.device)
        end = ProductEnd(scales_N=scales_N)
        launch_symmetric_product(x, x, out, form, end)
        return out

    def factor(self, gram_NRR: Tensor, step: Step) -> Tensor:
        a, b, c = step
        out = torch.empty_like(gram_NRR)
        end = ProductEnd(alpha=c, add_NRR=gram_NRR, beta=b, diagonal=a)
        launch_symmetric_product(gram_NRR, gram_NRR, out, "lower", end)
        return out

    def product(self, a_NRR: Tensor, b_NRR: Tensor, whole: WholeForm | None = None) -> Tensor:
        end = ProductEnd()
        dtype = torch.float16
        if whole is not None:
            end = ProductEnd(scales_N=whole.scales_N, mirrors=True)
            dtype = whole.dtype
        out = torch.empty_like(a_NRR, dtype=dtype)
        launch_symmetric_product(a_NRR, b_NRR, out, "lower", end)
        return out

    def whole(self, q_NRR: Tensor, form: WholeForm) -> Tensor:
        q = symmetric(q_NRR)
        if form.scales_N is not None:
            q = q * form.scales_N[:, None, None]
        return q.to(form.dtype)

    def apply(self, q_NRR: Tensor, x: Tensor, out: Tensor) -> None:
        left, right = q_NRR, x
        if is_tall(x):
            left, right = x, q_NRR
        count, rows, depth = left.shape
        width = right.shape[2]
        plan = plan_of_matrices(count, rows, x.device)
        # Matrices one below the other, as the rows of experts.
        a_rows = left.flatten(0, 1)
        b_rows = right.flatten(0, 1)
        out_rows = out.flatten(0, 1)
        b = block_descriptor(b_rows, 64, TILE_COLUMNS)
        outputs = plain_outputs(out_rows[None])
        gemm = GroupedGemm("nn", "plain", n=width, k=depth)
        launch_grouped_gemm(gemm, a_rows, b, outputs, plan)


def aligned_sides(shorter: int, longer: int) -> tuple[int, int]:
    """The sides of a matrix with zeros behind it. The shorter one, that of G, stays the shorter one."""
    depth = next_multiple(shorter, STEP_DEPTH)
    least = depth + int(longer > shorter)
    width = max(longer, least)
    return depth, next_multiple(width, ALIGNED)


def next_multiple(size: int, of: int) -> int:
    parts = -(-size // of)
    return parts * of


def fp16_squares(count: int, rows: int, device: torch.device) -> Tensor:
    shape = (count, rows, rows)
    return torch.empty(shape, dtype=torch.float16, device=device)


@cache
def plan_of_matrices(count: int, rows: int, device: torch.device) -> RowTilePlan:
    """Matrices as experts of as many rows."""
    numbers = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    ends = numbers * rows
    return RowTilePlan.of(ends, count * rows)


def launch_symmetric_product(a: Tensor, b: Tensor, out_NRR: Tensor, form: str, end: ProductEnd) -> None:
    """A B^T of matrices whose product is symmetric; `form`: how they lie in memory (symmetric_product_hopper.py)."""
    assert end.add_NRR is not None or end.beta == end.diagonal == 0.0, "added along with a matrix"
    count, rows, _ = out_NRR.shape
    depth = a.shape[1] if form == "columns" else a.shape[2]
    tiles = tiles_of_matrix(rows)
    total = count * tiles
    add = None if end.add_NRR is None else square_descriptor(end.add_NRR)
    out = square_descriptor(out_NRR)
    sizes = (total, tiles, depth)
    factors = (end.alpha, end.beta, end.diagonal)
    has_one_operand = a is b
    has_add = add is not None
    has_scales = end.scales_N is not None
    device = out_NRR.device
    multiprocessors = multiprocessor_count(device.index or 0)
    programs = min(total, multiprocessors)  # a persistent program on each
    launch = symmetric_product[(programs,)]
    launch(
        *operand_descriptors(a),
        *operand_descriptors(b),
        add,
        out,
        end.scales_N,
        *sizes,
        *factors,
        form,
        has_one_operand,
        has_add,
        has_scales,
        end.mirrors,
        STAGES,
        num_warps=4,
    )


def operand_descriptors(x: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    tile = TILE.value
    depth = DEPTH.value
    by_tile = block_descriptor(x, 1, tile, depth)
    by_depth = block_descriptor(x, 1, depth, tile)
    return by_tile, by_depth


def square_descriptor(x_NRR: Tensor) -> TensorDescriptor:
    side = HALF_ROWS.value
    return block_descriptor(x_NRR, 1, side, side)


def tiles_of_matrix(rows: int) -> int:
    """Tiles on and below the diagonal: two rows of tiles have as many each, one more than the two above them."""
    row_tiles = -(-rows // TILE.value)
    pairs, odd = divmod(row_tiles, 2)
    return (pairs + 1) * (pairs + odd)
