"""Log of faults that have stopped a run: `faults.jsonl` in its folder, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moefold.config.errors import RunFailure
from moefold.layout.axes import World
from moefold.watch.supervisor import FAULTS_FILE


class RecordedFault(RunFailure):
    """A fault that is logged. `record` has the step, the cause in a word or two, what was found, and more."""

    def __init__(self, message: str, step: int, cause: str, what: str, **known: Any):
        super().__init__(message)
        self.record: dict[str, Any] = {"step": step, "cause": cause, "what": what, **known}


@contextmanager
def logged_faults(out: Path, world: World) -> Iterator[None]:
    """Inside, a fault that stops the run is written to its folder by rank 0; all ranks raise the same."""
    try:
        yield
    except RecordedFault as fault:
        if world.rank == 0 and out.is_dir():
            line = json.dumps(fault.record | {"message": str(fault)})
            with (out / FAULTS_FILE).open("a") as log:
                log.write(f"{line}\n")
        raise
