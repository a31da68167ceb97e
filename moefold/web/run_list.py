"""Several runs in one page: how many, which, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moefold.config.errors import UserError

MAX_RUNS = 8  # curves in one plot whose colours can be told apart


def refuse_too_many_runs(folders: Sequence[Path]) -> None:
    if len(folders) > MAX_RUNS:
        raise UserError(f"{len(folders)} runs are too many to tell apart in one plot; expected at most {MAX_RUNS}")


def refuse_repeated_folders(folders: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for folder in folders:
        path = folder.resolve()
        if path in seen:
            raise UserError(f"{folder} is given twice; expected different runs: leave one out")
        seen.add(path)


def distinct_labels(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    paths = [folder.resolve() for folder in folders]
    count = 1
    labels = last_parts(paths, count)
    while len(set(labels)) < len(paths):
        count += 1
        labels = last_parts(paths, count)
    return labels


def last_parts(paths: Sequence[Path], count: int) -> list[str]:
    labels: list[str] = []
    for path in paths:
        parts = path.parts[-count:]
        labels.append("/".join(parts))
    return labels
