"""`moefold ckpt`: what is in a checkpoint, whether it is sound, and in what two differ. Without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moefold.checkpoint.format.ledger import LedgerDifference, compare_ledgers
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.retention import newest_checkpoint
from moefold.checkpoint.format.storage import StoragePath, parse_storage_path
from moefold.checkpoint.format.verify import OpenedCheckpoint, open_checkpoint, verify_checkpoint
from moefold.config.errors import UserError
from moefold.presets.command_options import read_options

MOST_LINES = 50  # lines of differences for people; --json has all


@dataclass(frozen=True)
class CkptOptions:
    """Look at checkpoints. `ls` lists the tensors of one, from its ledger; `verify` reads all of it and names what is
    not as it was written; `diff` names the tensors and experts in which two differ. Exit code 0: sound, or the same;
    1: not; 2: no checkpoint there."""

    what: tyro.conf.Positional[Literal["ls", "verify", "diff"]]
    path: tyro.conf.Positional[str]
    """A run, its checkpoints folder, or one checkpoint; a folder, or a path that fsspec knows."""
    other: tyro.conf.Positional[str | None] = None
    """For diff: the one to compare with."""
    json: bool = False
    """Print JSON instead of a table."""


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(CkptOptions, argv, "ckpt", config_keys=False)
    if (options.what == "diff") != (options.other is not None):
        raise UserError(f"moefold ckpt {options.what} takes {'two checkpoints' if options.what == 'diff' else 'one'}")
    path = newest_checkpoint(parse_storage_path(options.path))
    try:
        if options.what == "ls":
            return list_tensors(open_checkpoint(path), options.json)
        if options.what == "verify":
            return report_sound(verify_checkpoint(path), options.json)
        path, first = newest_checkpoint(parse_storage_path(str(options.other))), verify_checkpoint(path)
        return report_differences(first, verify_checkpoint(path), options.json)
    except DamagedCheckpoint as damaged:
        return report_damage(path, damaged, options.json)


def list_tensors(opened: OpenedCheckpoint, as_json: bool) -> int:
    if as_json:
        print_json(
            {**checkpoint_facts(opened), "tensors": {name: asdict(entry) for name, entry in opened.ledger.items()}}
        )
        return 0
    table = Table(title=escape(checkpoint_summary(opened)), title_justify="left")
    for column in ("tensor", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    table.add_column("MiB", justify="right")
    table.add_column("experts", justify="right")
    table.add_column("sha256", no_wrap=True)
    for name, entry in opened.ledger.items():
        size = f"{entry.spec.bytes / 2**20:.2f}"
        experts = str(len(entry.experts)) if entry.experts is not None else ""
        table.add_row(escape(name), entry.dtype, ",".join(map(str, entry.shape)), size, experts, entry.sha256[:12])
    Console().print(table)
    return 0


def checkpoint_facts(opened: OpenedCheckpoint) -> dict[str, Any]:
    known = {key: opened.manifest.get(key) for key in ("step", "moefold", "torch", "layout")}
    return {"path": str(opened.path), **known, "bytes": sum(e.spec.bytes for e in opened.ledger.values())}


def checkpoint_summary(opened: OpenedCheckpoint) -> str:
    facts = checkpoint_facts(opened)
    size = f"{len(opened.ledger)} tensors, {facts['bytes'] / 1e9:.3g} GB"
    return f"{opened.path}: step {facts['step']}, {size}, written by moefold {facts['moefold']}"


def report_sound(opened: OpenedCheckpoint, as_json: bool) -> int:
    if as_json:
        print_json({**checkpoint_facts(opened), "sound": True, "problems": []})
    else:
        print(f"sound: {checkpoint_summary(opened)}")
    return 0


def report_damage(path: StoragePath, damaged: DamagedCheckpoint, as_json: bool) -> int:
    if as_json:
        print_json({"path": str(path), "sound": False, "problems": list(damaged.problems)})
    else:
        print("\n".join([f"damaged: {path}", *(f"  {problem}" for problem in shorten_listing(damaged.problems))]))
    return 1


def report_differences(a: OpenedCheckpoint, b: OpenedCheckpoint, as_json: bool) -> int:
    found = compare_ledgers(a.ledger, b.ledger)
    if as_json:
        print_json(
            {"a": checkpoint_facts(a), "b": checkpoint_facts(b), "differences": [each._asdict() for each in found]}
        )
    elif found:
        print(f"from {checkpoint_summary(a)}\nto   {checkpoint_summary(b)}\n{count_differences(found)}")
        print("\n".join(shorten_listing([f"  {each.kind:<8} {each.text}" for each in found])))
    else:
        print(f"the same {len(a.ledger)} tensors: {a.path} and {b.path}")
    return 1 if found else 0


def count_differences(found: Sequence[LedgerDifference]) -> str:
    kinds = sorted({each.kind for each in found})
    return "differences: " + ", ".join(f"{kind} {sum(each.kind == kind for each in found)}" for kind in kinds)


def shorten_listing(lines: Sequence[str]) -> list[str]:
    return (
        list(lines)
        if len(lines) <= MOST_LINES
        else [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES} more; --json lists all"]
    )


def print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=1))
