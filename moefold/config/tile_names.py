"""Names that `parallel.tiles` may have: products whose tiles are multiplied while rows travel between ranks."""

from __future__ import annotations

TILE_NAMES = {
    "experts": "both products of routed experts, while tokens arrive and results return (symmetric)",
    "projections": "tensor-parallel projections of attention and MLPs, whose rows are gathered or sums scattered",
    "heads": "projections to and from heads, while ranks swap positions for them (parallel.context all_to_all)",
}


def tiles_in_words() -> str:
    return "; ".join(f"{name}, {says}" for name, says in TILE_NAMES.items())
