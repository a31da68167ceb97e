"""Pages of a stash: the numbers that the trainer and the planner share."""

from __future__ import annotations

PAGE_ROWS = 64
CELL_BYTES = 256  # of a row, in one page
PAGE_BYTES = PAGE_ROWS * CELL_BYTES
LEAST_ROW_BYTES = 64  # what has less for each row stays where it is


def stashed_bytes(rows: float, row_bytes: float) -> float:
    """Bytes of the pages that rows take."""
    blocks = -(-rows // PAGE_ROWS)
    cells = -(-row_bytes // CELL_BYTES)
    return blocks * cells * PAGE_BYTES
