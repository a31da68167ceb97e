"""How much memory attention's backward on Hopper takes for the gradients of its scores, dS, and so how many heads go at
once. Torch-free.

A head's dS^T is held by tiles of 64 queries: for each, 128 keys of every block that the tile sees, two bytes a score.
"""

from __future__ import annotations

HOPPER_HEAD_WIDTHS = (64, 128)  # of the heads that these kernels take
MOST_BYTES = 9 << 29  # of dS^T; where it would be more, some heads go after the others


def score_gradient_rows(positions: int) -> int:
    """Of a head's dS^T: 128 for each tile of queries that sees a block of keys."""
    blocks = -(-positions // 128)
    return blocks * (blocks + 1) * 128


def kv_heads_at_once(positions: int, units: int, group: int) -> int:
    """How many key/value heads, each with its group of query heads, go together: as many as may, as evenly as can be;
    none if one is too much."""
    most = MOST_BYTES // (group * score_gradient_rows(positions) * 64 * 2)
    return -(-units // -(-units // most)) if most else 0


def score_gradient_bytes(positions: int, units: int, group: int) -> int:
    """Of all heads that go together."""
    return kv_heads_at_once(positions, units, group) * group * score_gradient_rows(positions) * 64 * 2
