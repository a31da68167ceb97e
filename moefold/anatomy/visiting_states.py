"""Optimizer states in host memory that visit the device for the update: how large their chunks are, and how much device
memory these pass through. Torch-free: the planner counts it."""

from __future__ import annotations

CHUNK_ELEMENTS = 1 << 26  # a multiple of a block of moments; copies of some milliseconds, at full speed
LEAST_SLOTS = 3  # one arrives, one is updated, one leaves
GIB = 2**30


def slot_count(chunks: int, chunk_bytes: float, window_gib: float) -> int:
    """Slots for chunks that are under way: as many as the window has room for, and no more than there are chunks."""
    fitting = int(window_gib * GIB // max(1, chunk_bytes))
    return max(LEAST_SLOTS, min(chunks, fitting))


def visiting_bytes(parameters: float, state_bytes: float, window_gib: float) -> float:
    """Device memory that the states of so many parameters pass through."""
    if not parameters:
        return 0.0
    elements = min(parameters, CHUNK_ELEMENTS)
    chunk_bytes = elements * state_bytes / parameters
    chunks = -int(-parameters // CHUNK_ELEMENTS)
    return slot_count(chunks, chunk_bytes, window_gib) * chunk_bytes
