"""Attention of one new position to kept ones in Triton. Imported only where Triton is.

A program has some slots of a sequence and the queries that share a key head, at most HEADS of them; a second kernel
merges what the programs of a head give. A key's columns are MAIN and the REST behind them, so that widths that are no
power of two, such as 512 + 64 of a latent and its rotated part, waste little.

B sequences, L slots, H query heads, G key/value heads, D head width, V width of a value head, P programs that share the
slots of a sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.attention.heads_triton import power_of_two, split_width
from moefold.kernels.tile_triton import (
    load_as_fp32,
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

HEADS = 16  # queries of a program: the least rows of a product on tensor cores
PROGRAMS = 264  # two for each multiprocessor of an H200
LEAST_SLOTS = 128  # of a program


@triton.jit
def head_columns(FIRST: constexpr, WIDTH: constexpr, width):
    """Columns of a head from the first on, and which of them exist."""
    d = numbers_from(FIRST, WIDTH)
    return d, d < width


@triton.jit
def load_queries(q, row, real, width, FIRST: constexpr, WIDTH: constexpr):
    d, there = head_columns(FIRST, WIDTH, width)
    at = tile_pointers(q, row, d, width)
    inside = tile_mask(real, there)
    return load_or_zero(at, inside)


@triton.jit
def load_slots(room, made, row, is_kept, is_new, width, FIRST: constexpr, WIDTH: constexpr):
    """Kept rows, and for the new position the row that is made now."""
    d, there = head_columns(FIRST, WIDTH, width)
    at = tile_pointers(room, row, d, width)
    inside = tile_mask(is_kept, there)
    kept = load_or_zero(at, inside)
    new = load_or_zero(made + d, there)
    is_new_row = is_new[:, None]
    return tl.where(is_new_row, new[None, :], kept)


@triton.jit
def copy_row(made, room, row, width, WIDTH: constexpr):
    d, there = head_columns(0, WIDTH, width)
    values = load_or_zero(made + d, there)
    at = room + row * width
    store_inside(at + d, values, there)


@triton.jit
def scores_of(q, k):
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def exp_or_zero(x, top):
    """exp(x - top), zero where nothing has been seen."""
    is_seen = top > float("-inf")
    safe = tl.where(is_seen, top, 0.0)
    return tl.exp(x - safe)


@triton.jit
def cached_attention_kernel(
    q,
    k,
    v,
    keys,
    values,
    position,
    begin_B,
    sink_H,
    out,
    lse,
    scale,
    H,
    G,
    L,
    D,
    V,
    BLOCKS,
    P,
    MAIN: constexpr,
    REST: constexpr,
    WIDTH: constexpr,
    ALL: constexpr,
    ROWS: constexpr,
    STEP: constexpr,
    SHARED: constexpr,
    ALONE: constexpr,
):
    # prologue: the sequence, the key head, the queries, the slots
    program = tl.program_id(0)
    part = tl.program_id(1)
    block = program % BLOCKS
    group = program // BLOCKS % G
    b = (program // BLOCKS // G).to(tl.int64)
    per_group = H // G
    turn = numbers_from(block * ROWS, ROWS)
    real = turn < per_group
    head = b * H + group * per_group + turn
    q_main = load_queries(q, head, real, D, 0, MAIN)
    if REST:
        q_rest = load_queries(q, head, real, D, MAIN, REST)
    now = tl.load(position).to(tl.int32)
    begin = tl.load(begin_B + b).to(tl.int32)
    slot = now % L
    filled = tl.minimum(now + 1, L)
    share = tl.cdiv(filled, P)
    share = tl.cdiv(share, STEP) * STEP
    first = part * share
    last = tl.minimum(first + share, filled)
    made = b * G + group
    k_made = k + made * D
    v_made = v + made * V
    # main loop over the slots
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, last, STEP):
        s = numbers_from(start, STEP)
        is_filled = s < last
        held = now - (now - s) % L
        is_seen = is_filled & (held >= begin)
        is_new = s == slot
        is_kept = is_seen & (s != slot)
        row = (b * L + s) * G + group
        k_main = load_slots(keys, k_made, row, is_kept, is_new, D, 0, MAIN)
        scores = scores_of(q_main, k_main)
        if REST:
            k_rest = load_slots(keys, k_made, row, is_kept, is_new, D, MAIN, REST)
            scores += scores_of(q_rest, k_rest)
        scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay = exp_or_zero(top, new_top)
        p = exp_or_zero(scores, new_top[:, None])
        total = total * decay + tl.sum(p, 1)
        if SHARED:
            if WIDTH == MAIN:
                value = k_main
            else:
                value = load_slots(keys, k_made, row, is_kept, is_new, D, 0, WIDTH)
        else:
            value = load_slots(values, v_made, row, is_kept, is_new, V, 0, WIDTH)
        y = y * decay[:, None]
        y += tl.dot(p.to(value.dtype), value, input_precision="ieee")
        top = new_top
    # epilogue: the new position to its slot, by one program of each key head; the result
    if (part == 0) & (block == 0):
        written = (b * L + slot) * G + group
        copy_row(k_made, keys, written, D, ALL)
        if not SHARED:
            copy_row(v_made, values, written, V, WIDTH)
    if ALONE and sink_H is not None:
        sink = load_as_fp32(sink_H + group * per_group + turn, real)
        new_top = tl.maximum(top, sink)
        decay = exp_or_zero(top, new_top)
        total = total * decay + exp_or_zero(sink, new_top)
        y = y * decay[:, None]
    nothing = total == 0.0
    y = y / tl.where(nothing, 1.0, total)[:, None]
    line = head * P + part
    d, there = head_columns(0, WIDTH, V)
    at = tile_pointers(out, line, d, V)
    inside = tile_mask(real, there)
    store_inside(at, y.to(out.dtype.element_ty), inside)
    if not ALONE:
        log_total = tl.where(nothing, float("-inf"), top + tl.log(total))
        store_inside(lse + line, log_total, real)


@triton.jit
def merge_parts_kernel(
    parts,
    lse,
    sink_H,
    out,
    H,
    V,
    P,
    PARTS: constexpr,
    WIDTH: constexpr,
):
    """One head of a sequence: the softmax over the slots of all programs."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    real = part < P
    log_totals = tl.load(lse + head * P + part, mask=real, other=float("-inf"))
    top = tl.max(log_totals, 0)
    rest = 0.0
    if sink_H is not None:
        sink = tl.load(sink_H + head % H).to(tl.float32)
        top = tl.maximum(top, sink)
        rest = tl.exp(sink - top)
    shares = tl.exp(log_totals - top)
    total = tl.sum(shares, 0) + rest
    d, there = head_columns(0, WIDTH, V)
    at = tile_pointers(parts, head * P + part, d, V)
    inside = tile_mask(real, there)
    y = load_or_zero(at, inside)
    y = tl.sum(y * shares[:, None], 0) / total
    at = out + head * V + d
    store_inside(at, y.to(out.dtype.element_ty), there)


def count_parts(programs: int, slots: int) -> int:
    """Programs that share a sequence's slots, so that the device is full."""
    wanted = triton.cdiv(PROGRAMS, programs)
    most = triton.cdiv(slots, LEAST_SLOTS)
    return min(wanted, most)


def launch_cached_attention(
    out_BHV: Tensor,
    q_BHD: Tensor,
    k_BGD: Tensor,
    v_BGV: Tensor | None,
    keys_BLGD: Tensor,
    values_BLGV: Tensor | None,
    position: Tensor,
    begin_B: Tensor,
    scale: float,
    sink_H: Tensor | None,
) -> None:
    b, h, d = q_BHD.shape
    _, slots, g, _ = keys_BLGD.shape
    v = out_BHV.shape[-1]
    shared = values_BLGV is None or v_BGV is None
    q = q_BHD.contiguous()
    k = k_BGD.contiguous()
    made_value = k if v_BGV is None else v_BGV.contiguous()
    values = keys_BLGD if values_BLGV is None else values_BLGV
    blocks = triton.cdiv(h // g, HEADS)
    programs = b * g * blocks
    parts = count_parts(programs, slots)
    alone = parts == 1
    out = out_BHV
    if not alone:
        out = q.new_empty(b, h, parts, v, dtype=torch.float32)
    lse = q.new_empty(b, h, parts, dtype=torch.float32)
    main, rest = split_width(d)
    width = power_of_two(v)
    tensors = (q, k, made_value, keys_BLGD, values, position, begin_B, sink_H, out, lse)
    sizes = (scale, h, g, slots, d, v, blocks, parts)
    step = 32 if main > 128 else 64
    tile = {"MAIN": main, "REST": rest, "WIDTH": width, "ALL": power_of_two(d), "ROWS": HEADS, "STEP": step}
    launch = cached_attention_kernel[(programs, parts)]
    launch(*tensors, *sizes, **tile, SHARED=shared, ALONE=alone)
    if alone:
        return
    places = triton.next_power_of_2(parts)
    merge = merge_parts_kernel[(b * h,)]
    merge(out, lse, sink_H, out_BHV, h, v, parts, PARTS=places, WIDTH=width)
