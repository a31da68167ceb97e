"""`moefold ckpt`: the tensors of a checkpoint, its soundness, and the differences of two. Needs no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moefold.checkpoint.format.ledger import LedgerDifference, compare_ledgers
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.retention import newest_checkpoint
from moefold.checkpoint.format.storage import StoragePath, parse_storage_path
from moefold.config.errors import UserError
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options

if TYPE_CHECKING:
    from moefold.checkpoint.format.verify import OpenedCheckpoint

MOST_LINES = 50  # printed differences and problems; --json has all
MANIFEST_FACTS = ("step", "moefold", "torch", "layout")


@dataclass(frozen=True)
class CkptOptions:
    """Inspect checkpoints. `ls` lists the tensors of one, from its ledger; `verify` reads all files and names tensors
    that are not as written; `diff` names the tensors and experts in which two differ. Exit code 0: sound, or the same;
    1: damaged, or different; 2: no checkpoint there."""

    what: tyro.conf.Positional[Literal["ls", "verify", "diff"]]
    path: tyro.conf.Positional[str]
    """A run, its checkpoints folder, or one checkpoint; a folder, or a path that fsspec can open."""
    other: tyro.conf.Positional[str | None] = None
    """For diff: the checkpoint to compare with."""
    json: bool = False
    """Print JSON instead of a table."""


FORM = CommandForm("ckpt", CkptOptions)


def run_command(argv: Sequence[str]) -> int:
    from moefold.checkpoint.format.verify import open_checkpoint, verify_checkpoint  # numpy, from here on

    options, _ = read_options(FORM, argv)
    compares = options.what == "diff"
    if compares != (options.other is not None):
        wanted = "two checkpoints" if compares else "one"
        raise UserError(f"moefold ckpt {options.what} takes {wanted}")
    path = newest_checkpoint_at(options.path)
    # `path` is the checkpoint being read: damage is reported under its name.
    try:
        if options.what == "ls":
            return list_tensors(open_checkpoint(path), options.json)
        first = verify_checkpoint(path)
        if options.what == "verify":
            return report_sound(first, options.json)
        path = newest_checkpoint_at(str(options.other))
        second = verify_checkpoint(path)
        return report_differences(first, second, options.json)
    except DamagedCheckpoint as damaged:
        return report_damage(path, damaged, options.json)


def newest_checkpoint_at(text: str) -> StoragePath:
    path = parse_storage_path(text)
    return newest_checkpoint(path)


def list_tensors(opened: OpenedCheckpoint, as_json: bool) -> int:
    if as_json:
        content = checkpoint_facts(opened)
        tensors: dict[str, Any] = {}
        for name, entry in opened.ledger.items():
            tensors[name] = asdict(entry)
        content["tensors"] = tensors
        print_json(content)
    else:
        print_tensor_table(opened)
    return 0


def print_tensor_table(opened: OpenedCheckpoint) -> None:
    title = escape(checkpoint_summary(opened))
    table = Table(title=title, title_justify="left")
    for column in ("tensor", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    table.add_column("MiB", justify="right")
    table.add_column("experts", justify="right")
    table.add_column("sha256", no_wrap=True)
    for name, entry in opened.ledger.items():
        shape = ",".join(map(str, entry.shape))
        size = f"{entry.spec.bytes / 2**20:.2f}"
        experts = ""
        if entry.experts is not None:
            experts = str(len(entry.experts))
        digest = entry.sha256[:12]
        table.add_row(escape(name), entry.dtype, shape, size, experts, digest)
    Console().print(table)


def checkpoint_facts(opened: OpenedCheckpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": str(opened.path)}
    for key in MANIFEST_FACTS:
        facts[key] = opened.manifest.get(key)
    entries = opened.ledger.values()
    sizes = [entry.spec.bytes for entry in entries]
    facts["bytes"] = sum(sizes)
    return facts


def checkpoint_summary(opened: OpenedCheckpoint) -> str:
    facts = checkpoint_facts(opened)
    size = f"{len(opened.ledger)} tensors, {facts['bytes'] / 1e9:.3g} GB"
    return f"{opened.path}: step {facts['step']}, {size}, written by moefold {facts['moefold']}"


def report_sound(opened: OpenedCheckpoint, as_json: bool) -> int:
    if as_json:
        verdict = {"sound": True, "problems": []}
        print_json(checkpoint_facts(opened) | verdict)
    else:
        print(f"sound: {checkpoint_summary(opened)}")
    return 0


def report_damage(path: StoragePath, damaged: DamagedCheckpoint, as_json: bool) -> int:
    if as_json:
        problems = list(damaged.problems)
        shown_path = str(path)
        print_json({"path": shown_path, "sound": False, "problems": problems})
        return 1
    print(f"damaged: {path}")
    for problem in shorten_listing(damaged.problems):
        print(f"  {problem}")
    return 1


def report_differences(a: OpenedCheckpoint, b: OpenedCheckpoint, as_json: bool) -> int:
    differences = compare_ledgers(a.ledger, b.ledger)
    if as_json:
        content: dict[str, Any] = {"a": checkpoint_facts(a)}
        content["b"] = checkpoint_facts(b)
        content["differences"] = [difference._asdict() for difference in differences]
        print_json(content)
    elif differences:
        print(f"from {checkpoint_summary(a)}")
        print(f"to   {checkpoint_summary(b)}")
        print(count_differences(differences))
        lines = [f"  {difference.kind:<8} {difference.text}" for difference in differences]
        listing = shorten_listing(lines)
        print("\n".join(listing))
    else:
        print(f"the same {len(a.ledger)} tensors: {a.path} and {b.path}")
    return 1 if differences else 0


def count_differences(differences: Sequence[LedgerDifference]) -> str:
    counts = Counter(difference.kind for difference in differences)
    texts = [f"{kind} {counts[kind]}" for kind in sorted(counts)]
    return f"differences: {', '.join(texts)}"


def shorten_listing(lines: Sequence[str]) -> list[str]:
    hidden = len(lines) - MOST_LINES
    if hidden <= 0:
        return list(lines)
    return [*lines[:MOST_LINES], f"and {hidden} more; --json lists all"]


def print_json(content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    print(text)
