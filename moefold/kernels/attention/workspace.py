"""The workspace of attention's backward on Hopper: memory for the gradients of the scores, dS. Torch-free.

It limits how many heads are worked on at once. A head's dS^T is stored by tiles of 64 queries: each tile has 128 keys
of every key block that it sees, two bytes a score. A sequence of which no key/value head fits with all its query heads
is worked on in parts: some of these, a strip of the queries, a range of the keys (`backward_parts.py`).
"""

from __future__ import annotations

HOPPER_WIDTHS = ((64, 64), (128, 128), (192, 128))  # of heads and of their values, in the Hopper kernels
MOST_BYTES = 9 << 29  # limit of dS^T; above it, heads are worked on in several rounds
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
