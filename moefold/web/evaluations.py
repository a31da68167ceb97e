"""Evaluations of a run: `evaluations.jsonl` in its folder, one line for each `moefold eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moefold.config.errors import printable_text
from moefold.observe.metrics import iterate_records
from moefold.web.page_numbers import MOST_STEPS, as_float_array, round_significant
from moefold.web.run_folder import RUN_FILES

EVALUATIONS_FILE = "evaluations.jsonl"
SHOWN_EVALUATIONS = 100  # the last ones
Evaluation = tuple[int, str, list[tuple[str, float | None]]]  # step, file or task, figures with their names


def run_folder_of(path: Path) -> Path | None:
    """The run that a path names, or that its checkpoint is of."""
    resolved = path.resolve()
    for folder in (resolved, *resolved.parents[:2]):
        if all((folder / name).is_file() for name in RUN_FILES):
            return folder
    return None


def write_evaluation(folder: Path, step: int, results: dict[str, dict[str, Any]]) -> None:
    line = json.dumps({"step": step, "results": results})
    with (folder / EVALUATIONS_FILE).open("a") as file:
        file.write(f"{line}\n")


def read_evaluations(folder: Path) -> list[Evaluation]:
    """The last results of each file or task at each step, in the order of steps."""
    latest: dict[tuple[int, str], Evaluation] = {}
    for record in iterate_records(folder / EVALUATIONS_FILE):
        step = record["step"]
        results = record.get("results")
        if not 0 <= step < MOST_STEPS or not isinstance(results, dict):
            continue
        for name, figures in results.items():  # pyright: ignore[reportUnknownVariableType]
            shown = shown_figures(figures)
            if shown:
                text = printable_text(str(name))
                latest[step, text] = (step, text, shown)
    return sorted(latest.values())[-SHOWN_EVALUATIONS:]


def shown_figures(figures: Any) -> list[tuple[str, float | None]]:
    """Figures that are numbers."""
    shown: list[tuple[str, float | None]] = []
    if isinstance(figures, dict):
        for name, value in figures.items():  # pyright: ignore[reportUnknownVariableType]
            number = as_float_array(value, 0)
            if number is not None:
                words = printable_text(str(name)).replace("_", " ")
                shown.append((words, round_significant(float(number))))
    return shown
