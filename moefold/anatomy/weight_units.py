"""Units of weights that come before the steps that use them and leave behind them (model/unit_window.py): how many of
them a rank has at a time, and what memory they lie in (model/unit_memory.py). Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from moefold.config.run import PipelineConfig

UNITS_OF_A_PASS = 2  # the one in use, and the next, which is on its way


def units_at_a_time(pipeline: PipelineConfig) -> int:
    """Units of all passes at a time: of one pass, or with paired slots of a forward and a backward."""
    passes = 2 if pipeline.pair else 1
    return passes * UNITS_OF_A_PASS


def size_of_buffers(units: Iterable[float], pipeline: PipelineConfig) -> float:
    """The size of what units of these sizes lie in: for every two that are here, a buffer of the two largest."""
    sizes = sorted(filter(None, units))
    here = min(len(sizes), units_at_a_time(pipeline))
    buffers = ceil(here / UNITS_OF_A_PASS)
    largest = sizes[-UNITS_OF_A_PASS:]
    return buffers * sum(largest)
