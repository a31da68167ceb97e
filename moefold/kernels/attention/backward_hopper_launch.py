"""Launches of attention's backward on Hopper. Imported only where Triton is.

B sequences, S positions, H query heads, G key/value heads, D head width, V width of a value head; blocks of 128
positions, tiles of 64.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefold.kernels.attention.backward_hopper import attention_dkdv_hopper, attention_dq_hopper
from moefold.kernels.attention.backward_parts import BackwardPlan, Part, plan_backward, unit_rounds
from moefold.kernels.attention.heads_triton import (
    empty_gradients,
    load_delta,
    load_head_block,
    outer_strides,
    program_head,
    row_dots,
)
from moefold.kernels.attention.workspace import BYTES_PER_SCORE, HOPPER_WIDTHS, ceil_div
from moefold.kernels.hopper import block_descriptor
from moefold.kernels.tile_triton import numbers_from, program_block, wide_program_id

HOPPER_DTYPES = (torch.bfloat16, torch.float16)
PROGRAMS_PER_BAND = 256  # about two for each multiprocessor, a long one and a short one
WIDEST_BLOCK = 128  # columns of queries or keys in one block; further columns are a second one


class KeyTiles(NamedTuple):
    """Options of the kernel for dK and dV: stages in flight, and a consumer's buffers of dS^T."""

    STAGES: int
    TURNS: int


class QueryTiles(NamedTuple):
    """Options of the kernel for dQ: stages in flight, keys of a stage, and consumers, which have 128 queries each."""

    STAGES: int
    KEYS: int = 64
    CONSUMERS: int = 1


class HeadTiles(NamedTuple):
    """Options of both kernels."""

    of_keys: KeyTiles
    of_queries: QueryTiles


TILES = {  # by widths of heads and of their values
    (64, 64): HeadTiles(KeyTiles(4, 2), QueryTiles(4)),
    (128, 128): HeadTiles(KeyTiles(3, 2), QueryTiles(3)),
    (192, 128): HeadTiles(KeyTiles(2, 2), QueryTiles(4, 64, 2)),
}


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


def hopper_backward_applies(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> bool:
    """Whether the Hopper kernels can run here; wherever measured, they were faster than Triton's."""
    return hopper_supports(q, v, scale) and hopper_plan(q, k, v, causal) is not None


def hopper_supports(q: Tensor, v: Tensor, scale: float) -> bool:
    widths = head_widths(q, v)
    if not q.is_cuda:
        return False
    major, _ = torch.cuda.get_device_capability(q.device)
    if major != 9:
        return False
    if not q.numel() or scale <= 0:
        return False
    return widths in HOPPER_WIDTHS and q.dtype in HOPPER_DTYPES


def head_widths(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Those of queries and keys, and of values."""
    return q.shape[-1], v.shape[-1]


def hopper_plan(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> BackwardPlan | None:
    b, s, h, _ = q.shape
    g = k.shape[2]
    widths = head_widths(q, v)
    return plan_backward(s, b * g, h // g, *widths, causal)


def hopper_block_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    scale: float,
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
    (B, S, heads, width)."""
    plan = hopper_plan(q, k, v, causal)
    assert plan is not None, "not even 128 queries of one head fit"
    dq, dk, dv = empty_gradients(q, k, v)
    _, s, h, d = q.shape
    workspace = empty_workspace(plan, q)
    # Descriptors of all tensors for both kernels.
    widths = head_widths(q, v)
    tiles = TILES[widths]
    flat_k = flat_heads(k)
    inputs = (flat_heads(q), flat_k, flat_heads(v), flat_heads(dy))
    outputs = (flat_heads(dk), flat_heads(dv), workspace.scores)
    key_descriptors = descriptors_for_keys(*inputs, *outputs, *widths)
    query_descriptors = descriptors_for_queries(flat_k, workspace.scores, flat_heads(dq), d, tiles.of_queries.KEYS)
    key_options, query_options = kernel_options(*widths, causal)
    # Rounds of so many units, and the parts of each.
    kv_heads = k.shape[2]
    group = h // kv_heads
    sizes = (2 * ceil_div(s, 128), h, group)
    all_units = len(q) * kv_heads
    for unit, units in unit_rounds(all_units, plan.units):
        for part in plan.parts:
            numbers = (unit, units, *part, *sizes)
            grids = launch_grids(units, part, tiles.of_queries.CONSUMERS)
            launch = attention_dkdv_hopper[grids.of_keys,]
            sums = (*workspace.key_sums, statistics)
            launch(*key_descriptors, *sums, *numbers, grids.key_band, scale, **key_options)
            launch = attention_dq_hopper[grids.of_queries,]
            query_sums = workspace.query_sums
            launch(*query_descriptors, query_sums, *numbers, grids.query_band, scale, **query_options)
    return dq, dk, dv


class Grids(NamedTuple):
    """Programs of both launches of a part, and the columns of a band of each (`banded_tile`)."""

    of_keys: int
    of_queries: int
    key_band: int
    query_band: int


def launch_grids(units: int, part: Part, consumers: int) -> Grids:
    """`consumers`: of a program of queries."""
    key_blocks = part.last - part.first
    query_blocks = (part.end - part.top) // 2
    query_programs = ceil_div(query_blocks, consumers)
    heads = units * part.heads
    return Grids(units * key_blocks, heads * query_programs, band_of(key_blocks), band_of(query_programs))


class Workspace(NamedTuple):
    """dS^T in rows of 64 queries, and the sums that parts carry in fp32, or None."""

    scores: Tensor
    key_sums: tuple[Tensor | None, Tensor | None]
    query_sums: Tensor | None


def empty_workspace(plan: BackwardPlan, q: Tensor) -> Workspace:
    rows = plan.score_bytes // (64 * BYTES_PER_SCORE)
    scores = q.new_empty(rows, 64)
    of_keys = empty_sums(q, plan.key_sum_bytes // 2)
    of_values = empty_sums(q, plan.key_sum_bytes // 2)
    of_queries = empty_sums(q, plan.query_sum_bytes)
    return Workspace(scores, (of_keys, of_values), of_queries)


def empty_sums(q: Tensor, size: int) -> Tensor | None:
    """So many bytes of fp32."""
    return q.new_empty(size // 4, dtype=torch.float32) if size else None


def band_of(programs: int) -> int:
    """Heads in a band, of so many programs each."""
    return ceil_div(PROGRAMS_PER_BAND, programs)


def kernel_options(width: int, value_width: int, causal: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Of the kernel for dK and dV, and of that for dQ."""
    tiles = TILES[width, value_width]
    main = min(width, WIDEST_BLOCK)
    shared = {"D": main, "E": width - main, "CAUSAL": causal, "num_warps": 4}
    of_keys = tiles.of_keys._asdict() | shared | {"V": value_width}
    of_queries = tiles.of_queries._asdict() | shared
    if tiles.of_queries.CONSUMERS == 1:
        of_queries["maxnreg"] = 128  # half the registers, so that two programs share a multiprocessor
    return of_keys, of_queries


Descriptors = list[TensorDescriptor | None]


def descriptors_for_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    dk: Tensor,
    dv: Tensor,
    workspace: Tensor,
    width: int,
    value_width: int,
) -> Descriptors:
    """Of queries, keys, values, gradients of results, of keys, of values and of scores."""
    of_queries = split_descriptors(q, width)
    of_keys = split_descriptors(k, width)
    of_key_gradients = split_descriptors(dk, width)
    values, of_results, of_values = (block_descriptor(x, 1, 64, value_width) for x in (v, dy, dv))
    of_scores = block_descriptor(workspace, 64, 64)
    return [*of_queries, *of_keys, values, of_results, *of_key_gradients, of_values, of_scores]


def descriptors_for_queries(k: Tensor, workspace: Tensor, dq: Tensor, width: int, keys: int) -> Descriptors:
    """Of keys, gradients of scores and of queries, for so many keys at a time."""
    of_keys = split_descriptors(k, width, keys)
    of_scores = block_descriptor(workspace, keys, 64)
    of_queries = block_descriptor(dq, 1, 64, 64)
    return [*of_keys, of_scores, of_queries]


def split_descriptors(x_BSC: Tensor, width: int, positions: int = 64) -> Descriptors:
    """Two: for the first columns of a head, and for its further ones, or None."""
    main = min(width, WIDEST_BLOCK)
    first = block_descriptor(x_BSC, 1, positions, main)
    rest = width - main
    further = block_descriptor(x_BSC, 1, positions, rest) if rest else None
    return [first, further]


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


def flat_heads(x_BSHD: Tensor) -> Tensor:
    """(sequence, position, column), aligned as TMA needs it."""
    x = x_BSHD.flatten(2)
    b_stride, s_stride, _ = x.stride()
    strides_unaligned = b_stride % 8 or s_stride % 8
    if strides_unaligned or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x
