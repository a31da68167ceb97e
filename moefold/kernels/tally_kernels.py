"""Counts and sums by sequence in Triton, without atomics: blocks of a sequence's tokens leave theirs, and these are
added in order. Imported only where Triton is.

T tokens, B sequences of P blocks each, E experts, K choices.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def blocks_kernel(
    shares_TE, ids_TK, sums_BPE, counts_BPE, T, E, first, length,
    K: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b, p = tl.program_id(0), tl.program_id(1)
    within = p * TOKENS + tl.arange(0, TOKENS)
    t = b * length + within - first
    there = (within < length) & (t >= 0) & (t < T)
    e = tl.arange(0, WIDTH)
    inside = there[:, None] & (e < E)[None, :]
    shares = tl.load(shares_TE + t[:, None] * E + e[None, :], mask=inside, other=0.0)
    counts = tl.zeros([TOKENS, WIDTH], tl.int32)
    for k in tl.static_range(K):
        chosen = tl.load(ids_TK + t * K + k, mask=there, other=-1).to(tl.int32)
        counts += (chosen[:, None] == e[None, :]).to(tl.int32)
    at = (b * tl.num_programs(1) + p) * E + e
    tl.store(sums_BPE + at, tl.sum(shares, 0), mask=e < E)
    tl.store(counts_BPE + at, tl.sum(counts, 0), mask=e < E)


@triton.jit
def totals_kernel(sums_BPE, counts_BPE, sums_BE, counts_BE, P, E, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sums, counts = tl.zeros([BLOCKS, WIDTH], tl.float32), tl.zeros([BLOCKS, WIDTH], tl.int32)
    for start in range(0, P, BLOCKS):
        p = start + tl.arange(0, BLOCKS)
        at, mask = (b * P + p)[:, None] * E + e[None, :], (p < P)[:, None] & (e < E)[None, :]
        sums += tl.load(sums_BPE + at, mask=mask, other=0.0)
        counts += tl.load(counts_BPE + at, mask=mask, other=0)
    tl.store(sums_BE + b * E + e, tl.sum(sums, 0), mask=e < E)
    tl.store(counts_BE + b * E + e, tl.sum(counts, 0).to(tl.int64), mask=e < E)


@triton.jit
def spread_kernel(d_BE, out_TE, T, E, first, length, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = (first + i // E) // length
    tl.store(out_TE + i, tl.load(d_BE + b * E + i % E, mask=i < T * E, other=0.0), mask=i < T * E)


def tally(shares_TE: torch.Tensor, ids_TK: torch.Tensor, first: int, length: int, sequences: int):
    """(sums_BE, counts_BE), see tally.py."""
    (t, experts), device = shares_TE.shape, shares_TE.device
    width = triton.next_power_of_2(experts)
    tokens = max(1, 4096 // width)
    blocks = triton.cdiv(length, tokens)
    sums_BPE, sums_BE = (torch.empty(*shape, experts, device=device) for shape in ((sequences, blocks), (sequences,)))
    counts_BPE = torch.empty(sequences, blocks, experts, dtype=torch.int32, device=device)
    counts_BE = torch.empty(sequences, experts, dtype=torch.int64, device=device)
    blocks_kernel[(sequences, blocks)](
        shares_TE.contiguous(), ids_TK.contiguous(), sums_BPE, counts_BPE, t, experts, first, length,
        ids_TK.shape[1], tokens, width,
    )  # fmt: skip
    totals_kernel[(sequences, triton.cdiv(experts, 16))](
        sums_BPE, counts_BPE, sums_BE, counts_BE, blocks, experts, 64, 16
    )
    return sums_BE, counts_BE


def spread(d_BE: torch.Tensor, tokens: int, first: int, length: int) -> torch.Tensor:
    """Each token gets what its sequence has."""
    out_TE = d_BE.new_empty(tokens, d_BE.shape[1])
    if out_TE.numel():
        grid = (triton.cdiv(out_TE.numel(), 1024),)
        spread_kernel[grid](d_BE.contiguous(), out_TE, *out_TE.shape, first, length, 1024)
    return out_TE
