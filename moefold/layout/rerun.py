"""Reruns: a forward that repeats an earlier one for its backward, marked on the thread that runs it.

Counters, records and statistics ask (`inside_recompute`, model/steps.py), so that a repeated forward changes none of
them. `uses_expert_outputs` is False where nobody reads what the experts of the rerun return: they may leave their last
product out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

RerunKey = tuple[int, int]  # stage, microbatch
NO_KEY: RerunKey = (-1, -1)  # of a rerun that does not know its pass


class RerunState(threading.local):
    """The key of the pass whose forward this thread runs again, or None."""

    key: RerunKey | None = None
    uses_expert_outputs: bool = True


RERUN = RerunState()


@contextmanager
def rerunning(key: RerunKey = NO_KEY, uses_expert_outputs: bool = True) -> Iterator[None]:
    """Mark what this thread runs as a repetition of the pass with this key."""
    outer = (RERUN.key, RERUN.uses_expert_outputs)
    RERUN.key = key
    RERUN.uses_expert_outputs = uses_expert_outputs
    try:
        yield
    finally:
        RERUN.key, RERUN.uses_expert_outputs = outer


def rerun_key() -> RerunKey | None:
    """The key of the pass that is being run again on this thread, if any."""
    return RERUN.key
