"""How long each way of attending takes, measured: which one is chosen depends on the card and the shape. Torch-free.

Times of the shapes people train come with the package. Those of others are measured when a run first needs them, and
remembered in a file of the user's: `explain` reads both.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

AttentionTimes = dict[str, float]  # implementation -> milliseconds


class AttentionShape(NamedTuple):
    """Of one call: positions of a sequence, query heads, key and value heads, their widths."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        widths = f"{self.head_dim}" + (f", values of {self.value_dim}" if self.value_dim != self.head_dim else "")
        return f"{self.length} positions, {self.heads}/{self.kv_heads} heads of {widths}"


LEARNT: dict[str, AttentionTimes] = {}  # since this process began
TIMED_TOKENS = 16_384  # of what is timed, forward and backward
SHIPPED: dict[str, AttentionTimes] = {  # `moefold bench attention`, H200, torch 2.11, cuDNN 9.19
    "sm90: 4096 positions, 16/16 heads of 128": {"ordered": 1.66, "cudnn": 1.88, "flash": 3.41},
    "sm90: 4096 positions, 32/4 heads of 128": {"ordered": 3.20, "cudnn": 3.74, "flash": 7.13},
    "sm90: 4096 positions, 48/8 heads of 128": {"ordered": 4.76, "cudnn": 5.54, "flash": 9.98},
    "sm90: 4096 positions, 32/8 heads of 128": {"ordered": 3.20, "cudnn": 3.72, "flash": 6.82},
    "sm90: 4096 positions, 64/4 heads of 128": {"ordered": 6.39, "cudnn": 7.31, "flash": 13.34},
    "sm90: 4096 positions, 128/128 heads of 192, values of 128": {"cudnn": 21.52},
}


def timing_key(capability: tuple[int, int], shape: AttentionShape) -> str:
    return f"sm{capability[0]}{capability[1]}: {shape}"


def timing_cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moefold" / "attention.json"


def known_times(capability: tuple[int, int], shape: AttentionShape) -> AttentionTimes:
    """What was measured of this shape on such a card; nothing if nobody has."""
    name = timing_key(capability, shape)
    return LEARNT.get(name) or SHIPPED.get(name) or cached_timings().get(name) or {}


def cached_timings() -> dict[str, AttentionTimes]:
    try:
        found = json.loads(timing_cache_path().read_text())
    except (OSError, ValueError):  # not there, or cut off: it will be measured again
        return {}
    return found if isinstance(found, dict) else {}


def remember_times(capability: tuple[int, int], shape: AttentionShape, times: AttentionTimes) -> None:
    """For this run and the next; a machine that has no place for it measures again."""
    LEARNT[timing_key(capability, shape)] = times
    path, every = timing_cache_path(), cached_timings() | LEARNT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps(every, indent=1))
        os.replace(aside, path)
    except OSError:
        return
