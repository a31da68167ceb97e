"""Sizes of the choices that ranks announce to each other (kernels/routing/peer_plan.py)."""

from __future__ import annotations

BLOCK_TOKENS = 128  # tokens that are counted together


def blocks_of_tokens(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def columns_of_counts(experts: int, ranks: int) -> int:
    """Counts of a block: choices of each expert, tokens for each rank, and the number of a room."""
    return experts + ranks + 1
