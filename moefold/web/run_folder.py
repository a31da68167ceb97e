"""Folders that hold a run, and refusals of others."""

from __future__ import annotations

from pathlib import Path

from moefold.config.errors import UserError, did_you_mean

SHOWN_RUNS = 5
RUN_FILES = ("config.yaml", "metrics.jsonl")
FIRST_FILES = ("owner.json",)  # what a run that starts has before those


def require_run_folder(folder: Path) -> None:
    """Refuse a folder that holds no run, with advice."""
    if not folder.exists():
        siblings = run_folders_in(folder.parent)
        guess = did_you_mean(str(folder), map(str, siblings))
        expected = "expected the folder of a run, as `moefold train` names when it ends"
        raise UserError(f"no folder {folder}{guess}; {expected}")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; expected the folder of a run, such as {folder.parent}")
    missing: list[str] = []
    for name in RUN_FILES:
        path = folder / name
        if not path.is_file():
            missing.append(name)
    if missing:
        hint = "give a folder `moefold train` wrote"
        runs = run_folders_in(folder)
        if runs:
            shown = map(str, runs[:SHOWN_RUNS])
            inside = ", ".join(shown)
            hint = f"there are runs inside: {inside}"
        files = " and no ".join(missing)
        raise UserError(f"{folder} is no run: it has no {files}; {hint}")


def run_folders_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    metrics = folder.glob("*/metrics.jsonl")
    return sorted(path.parent for path in metrics)


def require_run_or_future_run(folder: Path) -> None:
    """Refuse what neither is a run nor can become one: a file, or a folder with other things in it."""
    if not folder.exists():
        return
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()}
        if not names or names & {*RUN_FILES, *FIRST_FILES}:
            return
    require_run_folder(folder)


def describe_absent_run(folder: Path) -> str:
    """What is not there yet, with the nearest run that is, for a name that was mistyped."""
    siblings = run_folders_in(folder.parent)
    guess = did_you_mean(str(folder), map(str, siblings))
    return f"waiting for {folder}: no folder there yet{guess}"
