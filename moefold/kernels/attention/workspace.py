"""The workspace of attention's backward on Hopper: memory for the gradients of the scores, dS. Torch-free.

It limits how many heads are worked on at once. A head's dS^T is stored by tiles of 64 queries: each tile has 128 keys
of every key block that it sees, two bytes a score. A sequence of which not one head fits is worked on in pairs of
chunks, whose gradients are added up in fp32 (`chunked_backward.py`).
"""

from __future__ import annotations

from typing import NamedTuple

HOPPER_HEAD_WIDTHS = (64, 128)  # head widths that the Hopper kernels support
MOST_BYTES = 9 << 29  # limit of dS^T; above it, heads are worked on in several rounds
CHUNK_BYTES = 4 << 30  # limit of dS^T of a pair of chunks, with the sums of their gradients
MOST_CHUNKS = 1024
LEAST_CHUNK = 2048  # positions
BYTES_PER_SUM = 4
KEY_BLOCK = 128
QUERY_TILE = 64
BYTES_PER_SCORE = 2


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def score_gradient_rows(positions: int, causal: bool = True) -> int:
    """Rows of one head's dS^T: 128 for each pair of a query tile and a key block that it sees."""
    blocks = ceil_div(positions, KEY_BLOCK)
    seen = 2 * blocks
    if causal:
        seen = blocks + 1
    return blocks * seen * KEY_BLOCK


def kv_head_bytes(positions: int, group: int, causal: bool = True) -> int:
    """dS^T of one key/value head with its group of query heads."""
    rows = score_gradient_rows(positions, causal)
    scores = rows * QUERY_TILE
    return group * scores * BYTES_PER_SCORE


def kv_heads_at_once(positions: int, units: int, group: int, causal: bool = True) -> int:
    """How many of `units` key/value heads fit at once, in rounds of nearly equal size; 0 if one alone is too large."""
    head_bytes = kv_head_bytes(positions, group, causal)
    return even_rounds(units, MOST_BYTES // head_bytes)


def even_rounds(units: int, most: int) -> int:
    """How many go at once, of which `most` could."""
    if most == 0:
        return 0
    rounds = ceil_div(units, most)
    return ceil_div(units, rounds)


class ChunkPlan(NamedTuple):
    """Positions of a chunk, key/value heads that are worked on at once, and the bytes of their workspace."""

    positions: int
    kv_heads: int
    workspace: int


def plan_chunks(positions: int, kv_heads: int, group: int, width: int) -> ChunkPlan | None:
    """The longest even chunks of a sequence of which some head fits, without a mask; None if there are none."""
    most = min(MOST_CHUNKS, positions // LEAST_CHUNK)
    for chunks in range(2, most + 1):
        if positions % chunks:
            continue
        size = positions // chunks
        head_bytes = chunk_head_bytes(positions, size, group, width)
        together = even_rounds(kv_heads, CHUNK_BYTES // head_bytes)
        if together:
            return ChunkPlan(size, together, together * head_bytes)
    return None


def chunk_head_bytes(positions: int, chunk: int, group: int, width: int) -> int:
    """Of one key/value head: dS^T of a pair of chunks, the sums of the gradients of all keys and values, and those of a
    chunk of queries."""
    scores = kv_head_bytes(chunk, group, causal=False)
    of_keys = 2 * positions * width
    of_queries = group * chunk * width
    sums = of_keys + of_queries
    return scores + sums * BYTES_PER_SUM


def score_gradient_bytes(positions: int, units: int, group: int) -> int:
    """Bytes of the workspace for the heads of one round."""
    heads = kv_heads_at_once(positions, units, group)
    head_bytes = kv_head_bytes(positions, group)
    return heads * head_bytes


def backward_workspace(positions: int, sequences: int, kv_heads: int, group: int, width: int) -> int:
    """Bytes of the workspace of causal attention's backward; 0 where the kernels for Hopper do not run."""
    whole = score_gradient_bytes(positions, sequences * kv_heads, group)
    if whole:
        return whole
    plan = plan_chunks(positions, kv_heads, group, width)
    return plan.workspace if plan else 0
