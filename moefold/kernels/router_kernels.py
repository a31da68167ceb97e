"""The router's choice and the order of rows it asks for, in Triton. Imported only where Triton is.

T tokens, E experts, K choices of a token, R = T K rows in expert order, B blocks of choices.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256  # choices that one program sorts


@triton.jit
def choose_kernel(
    logits_TE, bias_E, scores_TE, probs_TK, ids_TK, T, E,
    K: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Softmax, then K times the best of what is left; of equals the lower number."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, WIDTH)
    inside = (t < T)[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    logits = tl.load(logits_TE + at, mask=inside, other=-float("inf"))
    powers = tl.exp(logits - tl.max(tl.where(inside, logits, -1e30), 1)[:, None])
    scores = tl.where(inside, powers / tl.sum(tl.where(inside, powers, 0.0), 1)[:, None], 0.0)
    tl.store(scores_TE + at, scores, mask=inside)
    worth = tl.where(inside, scores + tl.load(bias_E + e, mask=e < E, other=0.0)[None, :], -float("inf"))
    k = tl.arange(0, SLOTS)
    probs = tl.zeros([TOKENS, SLOTS], tl.float32)
    ids = tl.zeros([TOKENS, SLOTS], tl.int32)
    for turn in tl.static_range(K):
        best = tl.max(worth, 1)
        which = tl.min(tl.where(worth == best[:, None], e[None, :], WIDTH), 1)
        taken = e[None, :] == which[:, None]
        prob = tl.sum(tl.where(taken, scores, 0.0), 1)
        here = (k == turn)[None, :]
        probs = tl.where(here, prob[:, None], probs)
        ids = tl.where(here, which[:, None], ids)
        worth = tl.where(taken, -float("inf"), worth)
    if NORMALIZE:
        probs = probs / tl.sum(probs, 1)[:, None]
    out = t[:, None] * K + k[None, :]
    real = (t < T)[:, None] & (k < K)[None, :]
    tl.store(probs_TK + out, probs, mask=real)
    tl.store(ids_TK + out, ids.to(tl.int64), mask=real)


@triton.jit
def choose_backward_kernel(
    dprobs_TK, dscores_TE, scores_TE, probs_TK, ids_TK, dlogits_TE, T, E,
    K: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """p = s / sum s over the chosen: ds = (dp - p . dp) / sum s. Of the softmax: dlogits = s (ds - s . ds)."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, WIDTH)
    k = tl.arange(0, SLOTS)
    inside = (t < T)[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    scores = tl.load(scores_TE + at, mask=inside, other=0.0)
    d = tl.load(dscores_TE + at, mask=inside, other=0.0)
    chosen = t[:, None] * K + k[None, :]
    real = (t < T)[:, None] & (k < K)[None, :]
    dprobs = tl.load(dprobs_TK + chosen, mask=real, other=0.0)
    if NORMALIZE:
        dprobs -= tl.sum(dprobs * tl.load(probs_TK + chosen, mask=real, other=0.0), 1)[:, None]
    taken = tl.zeros([TOKENS, WIDTH], tl.float32)
    sent = tl.zeros([TOKENS, WIDTH], tl.float32)
    for turn in tl.static_range(K):
        which = tl.load(ids_TK + t * K + turn, mask=t < T, other=-1).to(tl.int32)
        hit = e[None, :] == which[:, None]
        sent += tl.where(hit, tl.sum(tl.where((k == turn)[None, :], dprobs, 0.0), 1)[:, None], 0.0)
        taken += tl.where(hit, scores, 0.0)
    if NORMALIZE:
        sent = sent / tl.sum(taken, 1)[:, None]
    d += tl.where(inside, sent, 0.0)
    tl.store(dlogits_TE + at, scores * (d - tl.sum(scores * d, 1)[:, None]), mask=inside)


@triton.jit
def count_kernel(ids_R, counts_BE, R, E, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, WIDTH)
    ids = tl.load(ids_R + r, mask=r < R, other=WIDTH).to(tl.int32)
    counts = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_BE + tl.program_id(0) * E + e, counts, mask=e < E)


@triton.jit
def base_kernel(counts_BE, total_E, B, E, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """In place, for a few experts: how many rows each of them gets from the blocks before."""
    e = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    b = tl.arange(0, STEP)
    total = tl.zeros([WIDTH], tl.int32)
    for first in range(0, B, STEP):
        mask = (first + b < B)[:, None] & (e < E)[None, :]
        at = counts_BE + (first + b)[:, None] * E + e[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(total_E + e, total, mask=e < E)


@triton.jit
def place_kernel(
    ids_R, gates_R, base_BE, total_E, index_R, slots_R, gate_R, ends_E, R, E,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, WIDTH)
    total = tl.load(total_E + e, mask=e < E, other=0)
    ends = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(ends_E + e, ends, mask=e < E)
    ids = tl.load(ids_R + r, mask=r < R, other=WIDTH).to(tl.int32)
    same = (ids[:, None] == e[None, :]).to(tl.int32)
    base = ends - total + tl.load(base_BE + tl.program_id(0) * E + e, mask=e < E, other=0)
    row = tl.sum(same * (base[None, :] + tl.cumsum(same, 0) - 1), 1)
    tl.store(slots_R + r, row, mask=r < R)
    tl.store(index_R + row, r // K, mask=r < R)
    tl.store(gate_R + row, tl.load(gates_R + r, mask=r < R, other=0.0), mask=r < R)


def tokens_at_once(width: int) -> int:
    return max(1, 2048 // width)


def choose(logits_TE: torch.Tensor, bias_E: torch.Tensor, k: int, normalize: bool):
    """Weights and numbers of the chosen experts, and all scores."""
    t, experts = logits_TE.shape
    scores_TE, probs_TK = torch.empty_like(logits_TE), logits_TE.new_empty(t, k)
    ids_TK = torch.empty(t, k, dtype=torch.int64, device=logits_TE.device)
    width = triton.next_power_of_2(experts)
    tokens = tokens_at_once(width)
    if t:
        choose_kernel[(triton.cdiv(t, tokens),)](
            logits_TE, bias_E, scores_TE, probs_TK, ids_TK, t, experts, k, normalize, tokens, width,
            triton.next_power_of_2(k),
        )  # fmt: skip
    return probs_TK, ids_TK, scores_TE


def choose_backward(dprobs_TK, dscores_TE, scores_TE, probs_TK, ids_TK, normalize: bool) -> torch.Tensor:
    (t, experts), k = scores_TE.shape, ids_TK.shape[1]
    dlogits_TE = torch.empty_like(scores_TE)
    width = triton.next_power_of_2(experts)
    tokens = tokens_at_once(width)
    if t:
        choose_backward_kernel[(triton.cdiv(t, tokens),)](
            dprobs_TK, dscores_TE, scores_TE, probs_TK, ids_TK, dlogits_TE, t, experts, k, normalize, tokens, width,
            triton.next_power_of_2(k),
        )  # fmt: skip
    return dlogits_TE


def arrange(ids_NK: torch.Tensor, gates_NK: torch.Tensor, experts: int):
    """Rows sorted by expert and, within one, as they came: index_R, slots_NK, gate_R and where each expert ends. Blocks
    count, experts add up, blocks place: the same on every run, and nothing waits for the host."""
    (n, k), device = ids_NK.shape, ids_NK.device
    rows, blocks, width = n * k, triton.cdiv(n * k, BLOCK), triton.next_power_of_2(experts)
    index_R, slots_NK = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((rows,), (n, k)))
    ends_E = torch.zeros(experts, dtype=torch.int32, device=device)
    gate_R = gates_NK.new_empty(rows)
    if rows:
        counts_BE = torch.empty(blocks, experts, dtype=torch.int32, device=device)
        ids_NK = ids_NK.contiguous()
        count_kernel[(blocks,)](ids_NK, counts_BE, rows, experts, width, BLOCK, num_warps=8)
        total_E = torch.empty_like(ends_E)
        base_kernel[(triton.cdiv(experts, 8),)](counts_BE, total_E, blocks, experts, 8, 512, num_warps=8)
        place_kernel[(blocks,)](
            ids_NK, gates_NK.contiguous(), counts_BE, total_E, index_R, slots_NK, gate_R, ends_E, rows, experts, k,
            width, BLOCK,
            num_warps=8,
        )  # fmt: skip
    return index_R, slots_NK, gate_R, ends_E
