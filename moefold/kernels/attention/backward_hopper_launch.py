"""Launches of attention's backward on Hopper. Imported only where Triton is.

B sequences, S positions, H query heads, G key/value heads, D head width; blocks of 128 positions, tiles of 64.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.attention.backward_hopper import attention_dkdv_hopper, attention_dq_hopper
from moefold.kernels.attention.chunked_backward import KeySide, QuerySide, backward_in_chunks
from moefold.kernels.attention.heads_triton import (
    empty_gradients,
    load_delta,
    load_head_block,
    outer_strides,
    program_head,
    row_dots,
)
from moefold.kernels.attention.workspace import (
    HOPPER_HEAD_WIDTHS,
    ChunkPlan,
    kv_heads_at_once,
    plan_chunks,
    score_gradient_rows,
)
from moefold.kernels.hopper import block_descriptor
from moefold.kernels.tile_triton import numbers_from, program_block, wide_program_id

HOPPER_DTYPES = (torch.bfloat16, torch.float16)
STAGES = dict(zip(HOPPER_HEAD_WIDTHS, (4, 3), strict=True))  # pipeline stages, by head width
PROGRAMS_PER_BAND = 256  # about two for each multiprocessor, a long one and a short one


@triton.jit
def attention_statistics(
    y, dy, delta, lse, statistics,
    S, H, tiles, scale,
    y_b, y_s, y_h,
    d_b, d_s, d_h,
    DELTA: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The accumulators' initial values for 64 queries: minus the log-sum-exp, unscaled, and minus delta, which is given
    (DELTA) or sum(dy * y). Behind the end the former is minus infinity: such queries see nothing."""
    # the log-sum-exp
    b, h = program_head(H)
    head = wide_program_id(1)
    rows = program_block(0, 64)
    at = lse + head * S + rows
    inside = rows < S
    sums = tl.load(at, mask=inside, other=float("inf"))
    tile = head * tiles + tl.program_id(0)
    first = statistics + tile * 128
    here = numbers_from(first, 64)
    tl.store(here, -sums / scale)
    # delta
    if DELTA:
        delta_M = load_delta(delta, head, rows, S)
    else:
        y_head = y + b * y_b + h * y_h
        result = load_head_block(y_head, rows, y_s, S, D, D)
        dy_head = dy + b * d_b + h * d_h
        grads = load_head_block(dy_head, rows, d_s, S, D, D)
        delta_M = row_dots(result, grads)
    tl.store(here + 64, -delta_M)


def hopper_backward_applies(q: Tensor, k: Tensor, scale: float, causal: bool = True) -> bool:
    """Whether the Hopper kernels can run here; wherever measured, they were faster than Triton's."""
    return hopper_supports(q, scale) and scores_fit(q, k, causal)


def hopper_supports(q: Tensor, scale: float) -> bool:
    d = q.shape[-1]
    if not q.is_cuda:
        return False
    major, _ = torch.cuda.get_device_capability(q.device)
    if major != 9:
        return False
    if not q.numel() or scale <= 0:
        return False
    return d in HOPPER_HEAD_WIDTHS and q.dtype in HOPPER_DTYPES


def scores_fit(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Whether the gradients of the scores of some head fit."""
    b, s, h, _ = q.shape
    g = k.shape[2]
    units = b * g
    group = h // g
    return kv_heads_at_once(s, units, group, causal) > 0


def hopper_chunks(q: Tensor, k: Tensor, scale: float) -> ChunkPlan | None:
    """Chunks of which some head fits, where no head of the whole sequence does; None where the kernels cannot run."""
    if not hopper_supports(q, scale):
        return None
    _, s, h, d = q.shape
    g = k.shape[2]
    return plan_chunks(s, g, h // g, d)


def launch_hopper_chunks(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    scale: float,
    plan: ChunkPlan,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a sequence of which no head's scores fit, by pairs of chunks."""
    queries = QuerySide(dy, q, lse_BHS, delta_BHS)
    keys = KeySide(k, v)
    pair_backward = partial(hopper_block_backward, scale)
    return backward_in_chunks(pair_backward, queries, keys, plan, causal)


def hopper_block_backward(
    scale: float,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a square block, of which the log-sum-exp over all keys and delta are known."""
    statistics = block_statistics(delta_BHS, lse_BHS, scale)
    return launch_hopper_backward(dy, q, k, v, statistics, scale, causal)


def launch_hopper_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Tensor,
    scale: float,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of square attention, causal or over all keys; all tensors but `softmax_statistics` are
    (B, S, heads, D)."""
    b, s, h, d = q.shape
    g = k.shape[2]
    group = h // g
    all_units = b * g
    blocks = triton.cdiv(s, 128)
    dq, dk, dv = empty_gradients(q, k, v)
    # Workspace for dS^T of as many units as fit at once.
    together = kv_heads_at_once(s, all_units, group, causal)
    rows_of_head = score_gradient_rows(s, causal)
    rows = together * group * rows_of_head
    workspace = q.new_empty(rows, 64)
    # Descriptors of all tensors.
    ds = block_descriptor(workspace, 64, 64)
    q_desc = head_descriptor(q, d)
    k_desc = head_descriptor(k, d)
    v_desc = head_descriptor(v, d)
    dy_desc = head_descriptor(dy, d)
    dk_desc = head_descriptor(dk, d)
    dv_desc = head_descriptor(dv, d)
    dq_desc = head_descriptor(dq, 64)
    inputs = (q_desc, k_desc, v_desc, dy_desc)
    outputs = (dk_desc, dv_desc, ds, statistics)
    # Rounds of so many units.
    band = triton.cdiv(PROGRAMS_PER_BAND, blocks)
    tiles = 2 * blocks
    sizes = (tiles, h, group, band, scale)
    stages = STAGES[d]
    options = {"D": d, "STAGES": stages, "CAUSAL": causal, "num_warps": 4}
    for unit in range(0, all_units, together):
        units_left = all_units - unit
        units = min(together, units_left)
        launch = attention_dkdv_hopper[units * blocks,]
        launch(*inputs, *outputs, unit, units, *sizes, **options)
        # Half the registers, so that two programs share a multiprocessor.
        heads = units * group
        launch = attention_dq_hopper[heads * blocks,]
        launch(k_desc, ds, dq_desc, unit, heads, *sizes, **options, maxnreg=128)
    return dq, dk, dv


def softmax_statistics(y: Tensor, dy: Tensor, lse_BHS: Tensor, scale: float) -> Tensor:
    """(B H, tiles, 2, 64): what `attention_statistics` computes, with delta from the results and their gradients."""
    statistics = empty_statistics(lse_BHS)
    launch_statistics(y, dy, None, lse_BHS, statistics, scale)
    return statistics


def block_statistics(delta_BHS: Tensor, lse_BHS: Tensor, scale: float) -> Tensor:
    """The same of one block of ring attention, whose delta is known."""
    statistics = empty_statistics(lse_BHS)
    delta = delta_BHS.contiguous()
    launch_statistics(None, None, delta, lse_BHS, statistics, scale)
    return statistics


def empty_statistics(lse_BHS: Tensor) -> Tensor:
    b, h, s = lse_BHS.shape
    heads = b * h
    tiles = 2 * triton.cdiv(s, 128)
    return lse_BHS.new_empty(heads, tiles, 2, 64, dtype=torch.float32)


def launch_statistics(
    y: Tensor | None,
    dy: Tensor | None,
    delta: Tensor | None,
    lse_BHS: Tensor,
    statistics: Tensor,
    scale: float,
) -> None:
    _, h, s = lse_BHS.shape
    heads, tiles, _, _ = statistics.shape
    strides = [0] * 6
    width = 0
    if y is not None and dy is not None:
        strides = outer_strides(y, dy)
        width = y.shape[-1]
    sums = lse_BHS.contiguous()
    has_delta = delta is not None
    tensors = (y, dy, delta, sums, statistics)
    sizes = (s, h, tiles, scale)
    launch = attention_statistics[tiles, heads]
    launch(*tensors, *sizes, *strides, has_delta, width)


def head_descriptor(x_BSHD: Tensor, width: int) -> TensorDescriptor:
    """TMA descriptor of (sequence, position, column), for 64 positions of so many columns."""
    x = x_BSHD.flatten(2)
    b_stride, s_stride, _ = x.stride()
    strides_unaligned = b_stride % 8 or s_stride % 8
    if strides_unaligned or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return block_descriptor(x, 1, 64, width)
