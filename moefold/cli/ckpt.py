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

from moefold.checkpoint.ledger import Difference, compare
from moefold.checkpoint.manifest import Damaged
from moefold.checkpoint.place import Place, place_of
from moefold.checkpoint.shelf import newest
from moefold.checkpoint.verify import Opened, open_checkpoint, verify
from moefold.cli.options import read
from moefold.config.refused import Refused

MOST = 50  # lines of differences for people; --json has all


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


def run(argv: Sequence[str]) -> int:
    options, _ = read(CkptOptions, argv, "ckpt", config_keys=False)
    if (options.what == "diff") != (options.other is not None):
        raise Refused(f"moefold ckpt {options.what} takes {'two checkpoints' if options.what == 'diff' else 'one'}")
    path = newest(place_of(options.path))
    try:
        if options.what == "ls":
            return list_tensors(open_checkpoint(path), options.json)
        if options.what == "verify":
            return tell_sound(verify(path), options.json)
        path, first = newest(place_of(str(options.other))), verify(path)
        return tell_differences(first, verify(path), options.json)
    except Damaged as damaged:
        return tell_damage(path, damaged, options.json)


def list_tensors(opened: Opened, as_json: bool) -> int:
    if as_json:
        show({**about(opened), "tensors": {name: asdict(entry) for name, entry in opened.ledger.items()}})
        return 0
    table = Table(title=escape(summary(opened)), title_justify="left")
    for column in ("tensor", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    table.add_column("MiB", justify="right")
    table.add_column("experts", justify="right")
    table.add_column("sha256", no_wrap=True)
    for name, entry in opened.ledger.items():
        size = f"{entry.what.bytes / 2**20:.2f}"
        experts = str(len(entry.experts)) if entry.experts is not None else ""
        table.add_row(escape(name), entry.dtype, ",".join(map(str, entry.shape)), size, experts, entry.sha256[:12])
    Console().print(table)
    return 0


def about(opened: Opened) -> dict[str, Any]:
    known = {key: opened.manifest.get(key) for key in ("step", "moefold", "torch", "layout")}
    return {"path": str(opened.path), **known, "bytes": sum(e.what.bytes for e in opened.ledger.values())}


def summary(opened: Opened) -> str:
    facts = about(opened)
    size = f"{len(opened.ledger)} tensors, {facts['bytes'] / 1e9:.3g} GB"
    return f"{opened.path}: step {facts['step']}, {size}, written by moefold {facts['moefold']}"


def tell_sound(opened: Opened, as_json: bool) -> int:
    if as_json:
        show({**about(opened), "sound": True, "problems": []})
    else:
        print(f"sound: {summary(opened)}")
    return 0


def tell_damage(path: Place, damaged: Damaged, as_json: bool) -> int:
    if as_json:
        show({"path": str(path), "sound": False, "problems": list(damaged.problems)})
    else:
        print("\n".join([f"damaged: {path}", *(f"  {problem}" for problem in shortened(damaged.problems))]))
    return 1


def tell_differences(a: Opened, b: Opened, as_json: bool) -> int:
    found = compare(a.ledger, b.ledger)
    if as_json:
        show({"a": about(a), "b": about(b), "differences": [each._asdict() for each in found]})
    elif found:
        print(f"from {summary(a)}\nto   {summary(b)}\n{count(found)}")
        print("\n".join(shortened([f"  {each.kind:<8} {each.text}" for each in found])))
    else:
        print(f"the same {len(a.ledger)} tensors: {a.path} and {b.path}")
    return 1 if found else 0


def count(found: Sequence[Difference]) -> str:
    kinds = sorted({each.kind for each in found})
    return "differences: " + ", ".join(f"{kind} {sum(each.kind == kind for each in found)}" for kind in kinds)


def shortened(lines: Sequence[str]) -> list[str]:
    return list(lines) if len(lines) <= MOST else [*lines[:MOST], f"and {len(lines) - MOST} more; --json lists all"]


def show(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=1))
