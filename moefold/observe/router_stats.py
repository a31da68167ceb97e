"""Router statistics: balance of expert load in one step, and warnings of dead experts.

    max violation   most loaded / mean - 1         0 is even, 1 is an expert with twice its share
    load entropy    -sum p log p / log E           1 is even, 0 is all load on one expert
    drop rate       dropped / choices made         choices are counted before any is dropped
    rank rows       largest rank's / mean          rows of experts on ep ranks, where hot experts are cloned

L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moefold.observe.metrics import JsonLines

WRITTEN_DIGITS = 6  # decimals of written values: enough for a drop rate of one in a million


@dataclass(frozen=True)
class RouterCounts:
    """Counts of one step, one entry for each MoE layer, summed over all ranks and the whole global batch."""

    layers: list[int]  # number of the layer in the model
    load: list[list[int]]  # choices of each expert, before any is dropped
    dropped: list[int]  # choices dropped for lack of capacity
    moved: list[int]  # bytes of tokens that dispatch and combine sent in forward; backward sends as many again
    # of clones: rows if all ranks had the largest one's, the same without clones, rows, bytes of weights in forward
    clones: list[list[int]] = field(default_factory=list)


def balance_summary(counts: RouterCounts) -> dict[str, list[Any]]:
    """Balance of a step: each figure is a list with one entry for each MoE layer."""
    loads = counts.load
    drop_rates = map(drop_rate, loads, counts.dropped)
    summary = {
        "max_violation": rounded(map(max_violation, loads)),
        "load_entropy": rounded(map(load_entropy, loads)),
        "dead_experts": [load.count(0) for load in loads],
        "drop_rate": rounded(drop_rates),
        "moved_bytes": list(counts.moved),
    }
    if has_clones(counts):
        summary |= clone_summary(counts.clones)
    return summary


def has_clones(counts: RouterCounts) -> bool:
    """Whether hot experts were cloned, or would have been."""
    return any(map(any, counts.clones))


def clone_summary(clones: list[list[int]]) -> dict[str, list[Any]]:
    """Rows of the largest rank over the mean, with clones and as they would be without, and bytes of clones."""
    filled, filled_without, rows, sent = zip(*clones, strict=True)
    return {
        "rank_rows": rounded(map(over_mean, filled, rows)),
        "rank_rows_without": rounded(map(over_mean, filled_without, rows)),
        "clone_bytes": list(sent),
    }


def over_mean(filled: int, rows: int) -> float:
    return filled / rows if rows else 1.0


def drop_rate(load: Sequence[int], dropped: int) -> float:
    choices = sum(load)
    return dropped / max(choices, 1)


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, WRITTEN_DIGITS) for value in values]


def max_violation(load: Sequence[int]) -> float:
    """Load of the most loaded expert / mean - 1; 0 for a layer without tokens."""
    total = sum(load)
    if not total:
        return 0.0
    if_all_had_most = max(load) * len(load)
    return if_all_had_most / total - 1


def load_entropy(load: Sequence[int]) -> float:
    """Entropy of the load's distribution as a share of the highest possible; 1 for a single expert."""
    total = sum(load)
    if not total or len(load) == 1:
        return 1.0
    shares = [choices / total for choices in load if choices]
    terms = [share * math.log(share) for share in shares]
    highest = math.log(len(load))
    return -sum(terms) / highest


class RouterLog:
    """`router.jsonl`: the load of every expert, one line per `every` steps. Continues a file as JsonLines does."""

    def __init__(self, path: Path, every: int, keep_through: int):
        self.lines = JsonLines(path, keep_through)
        self.every = every

    def write(self, step: int, counts: RouterCounts) -> None:
        if step % self.every == 0:
            record = {"step": step} | vars(counts)
            if not has_clones(counts):
                del record["clones"]
            self.lines.write(record)

    def close(self) -> None:
        self.lines.close()


class DeadExpertWatch:
    """Warns once for each expert without a token for `patience` steps in a row; a later token resets its count. After a
    warning the next comes `patience` steps later at the earliest, and tells all experts in between."""

    def __init__(self, patience: int = 20):
        self.patience = patience
        self.idle_LE: np.ndarray | None = None  # steps in a row in which an expert got no token
        self.untold_LE = np.zeros(1, dtype=bool)
        self.silent_steps = patience  # since the last warning

    def look(self, counts: RouterCounts) -> str | None:
        """A warning about the experts that reached `patience` since the last one, or None."""
        load_LE = np.asarray(counts.load)
        if self.idle_LE is None:
            self.idle_LE = np.zeros_like(load_LE)
        is_idle_LE = load_LE == 0
        self.idle_LE = np.where(is_idle_LE, self.idle_LE + 1, 0)
        is_dead_LE = self.idle_LE == self.patience
        self.untold_LE = (self.untold_LE | is_dead_LE) & is_idle_LE
        self.silent_steps += 1
        if self.silent_steps < self.patience or not self.untold_LE.any():
            return None
        dead = dead_by_layer(counts.layers, self.untold_LE)
        self.untold_LE[:] = False
        self.silent_steps = 0
        return (
            f"warning: {listed_layers(dead)} got no token for {self.patience} steps; "
            "raise --model.moe.balance.bias_rate or --model.moe.balance.aux_loss to bring them back"
        )


def dead_by_layer(layers: Sequence[int], is_dead_LE: np.ndarray) -> dict[int, list[int]]:
    dead: dict[int, list[int]] = {}
    for layer, is_dead_E in zip(layers, is_dead_LE, strict=True):
        ids = np.flatnonzero(is_dead_E).tolist()
        if ids:
            dead[layer] = ids
    return dead


def listed_layers(dead: dict[int, list[int]]) -> str:
    """experts 3, 5 of layer 1; of many layers, the first three and the number of experts in the others."""
    shown: list[str] = []
    for layer, ids in list(dead.items())[:3]:
        noun = "expert" if len(ids) == 1 else "experts"
        shown.append(f"{noun} {listed_experts(ids)} of layer {layer}")
    others = list(dead.values())[3:]
    if others:
        experts = sum(map(len, others))
        shown.append(f"{experts} more in {len(others)} other layers")
    return "; ".join(shown)


def listed_experts(ids: Sequence[int]) -> str:
    """3, 5, 9; of many ids, the first eight and the number of the others."""
    shown = ", ".join(map(str, ids[:8]))
    others = len(ids) - 8
    return shown if others <= 0 else f"{shown} and {others} more"
