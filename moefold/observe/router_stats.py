"""How evenly the routers spread tokens over experts: what one step counted, what it means, and when to warn.

    max violation   most loaded / mean - 1         0 is even, 1 is an expert with twice its share
    load entropy    -sum p log p / log E           1 is even, 0 is one expert with everything
    drop rate       dropped / choices made         choices are counted before any is dropped

L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.observe.metrics import JsonLines

WRITTEN_DIGITS = 6  # of what is written: a drop rate of one in a million still shows


@dataclass(frozen=True)
class RouterCounts:
    """What one step counted, one entry for each MoE layer: choices over the whole global batch, bytes on this rank."""

    layers: list[int]  # its number in the model
    load: list[list[int]]  # the router's choices of each expert, before any was dropped
    dropped: list[int]  # how many of these the experts had no room for
    moved: list[int]  # bytes its dispatch and combine sent from this rank to others


def balance_summary(counts: RouterCounts) -> dict[str, list[Any]]:
    """The step's balance as numbers for people, each a list with one entry for each MoE layer."""
    return {
        "max_violation": [round(max_violation(load), WRITTEN_DIGITS) for load in counts.load],
        "load_entropy": [round(load_entropy(load), WRITTEN_DIGITS) for load in counts.load],
        "dead_experts": [sum(1 for choices in load if not choices) for load in counts.load],
        "drop_rate": [
            round(dropped / max(sum(load), 1), WRITTEN_DIGITS)
            for load, dropped in zip(counts.load, counts.dropped, strict=True)
        ],
        "moved_bytes": list(counts.moved),
    }


def max_violation(load: Sequence[int]) -> float:
    """Most loaded / mean - 1; a layer that got nothing is not uneven."""
    total = sum(load)
    return max(load) * len(load) / total - 1 if total else 0.0


def load_entropy(load: Sequence[int]) -> float:
    """Entropy of the load's distribution as a share of the highest it could be; one expert alone is always even."""
    total = sum(load)
    if not total or len(load) == 1:
        return 1.0
    return -sum(n / total * math.log(n / total) for n in load if n) / math.log(len(load))


class RouterLog:
    """`router.jsonl`: the load of every expert, one line every so many steps. Continues a file as JsonLines does."""

    def __init__(self, path: Path, every: int, keep_through: int):
        self.lines, self.every = JsonLines(path, keep_through), every

    def write(self, step: int, counts: RouterCounts) -> None:
        if step % self.every == 0:
            self.lines.write({"step": step, **vars(counts)})

    def close(self) -> None:
        self.lines.close()


class DeadExpertWatch:
    """Warns once for each expert that got nothing for `patience` steps on end; one that lives again may die again."""

    def __init__(self, patience: int = 20):
        self.patience = patience
        self.idle_LE: np.ndarray | None = None  # steps on end in which an expert got nothing

    def look(self, counts: RouterCounts) -> str | None:
        """A warning about the experts whose patience ran out in this very step, or nothing."""
        load_LE = np.asarray(counts.load)
        before_LE = np.zeros_like(load_LE) if self.idle_LE is None else self.idle_LE
        self.idle_LE = np.where(load_LE == 0, before_LE + 1, 0)
        dead = [
            f"{'expert' if len(ids) == 1 else 'experts'} {listed_experts(ids)} of layer {layer}"
            for layer, ids_E in zip(counts.layers, self.idle_LE == self.patience, strict=True)
            if (ids := np.flatnonzero(ids_E).tolist())
        ]
        if not dead:
            return None
        return (
            f"warning: {'; '.join(dead)} got no token for {self.patience} steps; "
            "raise --model.moe.balance.bias_rate or --model.moe.balance.aux_loss to bring them back"
        )


def listed_experts(ids: Sequence[int]) -> str:
    """3, 5, 9; of many, the first eight and how many more."""
    shown = ", ".join(str(i) for i in ids[:8])
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
