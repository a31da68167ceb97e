"""Agreement of ranks before the first step: settings, options, code and data are the same on all of them.

`agree_through_store` compares before any process group exists: ranks of different layouts would create different groups
and wait for each other. Every rank hears of the first difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from moefold.config.errors import UserError
from moefold.config.keys import format_value, iterate_keys
from moefold.config.run import Config
from moefold.version import __version__

Terms = Mapping[str, str]  # what must be the same on all ranks, by name


def comparable_settings(config: Config) -> dict[str, str]:
    return {key.path: format_value(key.default) for key in iterate_keys(config)}


def code_versions() -> dict[str, str]:
    return {
        "moefold version": __version__,
        "torch version": torch.__version__,
        "moefold source": source_digest(),
    }


@cache
def source_digest() -> str:
    """A digest of all source files of this package."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def differences(mine: Terms, first: Terms, rank: int) -> list[str]:
    """A problem for each term of this rank that is not as on rank 0."""
    problems: list[str] = []
    for name, value in mine.items():
        expected = first.get(name, "absent")
        if value == expected:
            continue
        text = f"{name} = {value} on rank {rank}, but {expected} on rank 0"
        problems.append(f"{text}; start all ranks alike")
    return problems


def agree_through_store(terms: Terms, store: dist.Store, rank: int, size: int) -> None:
    """Compare the terms of all ranks with those of rank 0; refuse a difference on every rank. Each rank sends a few
    messages, whatever the number of ranks."""
    if rank == 0:
        store.set("terms/first", json.dumps(terms))
    raw = store.get("terms/first")
    problems = differences(terms, json.loads(raw), rank)
    if problems:
        store.set("terms/problems", json.dumps(problems))
        store.add("terms/differing", 1)
    meet_at(store, "compared", size)
    if store.add("terms/differing", 0) == 0:
        return
    found = json.loads(store.get("terms/problems"))
    meet_at(store, "read", size)  # rank 0 may serve the store: it leaves when all have read
    raise UserError(*found)


def meet_at(store: dist.Store, name: str, size: int) -> None:
    """Wait until all ranks are here."""
    arrived = store.add(f"terms/{name}", 1)
    everyone = f"terms/{name} by all"
    if arrived == size:
        store.set(everyone, "")
    with suppress(RuntimeError):  # rank 0 was told by the last rank, and has left
        store.wait([everyone])
