"""Measured times of the attention implementations: the fastest depends on the GPU and on the shape. Torch-free.

Times of the shapes of published models come with the package. Times of other shapes are measured when a run first
needs them and kept in a file in the user's cache folder; `explain` reads both.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from moefold.kernels.choice import current_name
from moefold.kernels.facts import AttentionShape, Capability

AttentionTimes = dict[str, float]  # implementation -> milliseconds

LEARNT: dict[str, AttentionTimes] = {}  # measured by this process
TIMED_TOKENS = 16_384  # tokens of a timed call, forward and backward
SHIPPED: dict[str, AttentionTimes] = {  # `moefold bench attention`, H200, torch 2.11, cuDNN 9.19
    "sm90: 4096 positions, 16/16 heads of 128": {"deterministic": 1.66, "cudnn": 1.88, "flash": 3.41},
    "sm90: 4096 positions, 32/4 heads of 128": {"deterministic": 3.20, "cudnn": 3.74, "flash": 7.13},
    "sm90: 4096 positions, 48/8 heads of 128": {"deterministic": 4.76, "cudnn": 5.54, "flash": 9.98},
    "sm90: 4096 positions, 32/8 heads of 128": {"deterministic": 3.20, "cudnn": 3.72, "flash": 6.82},
    "sm90: 4096 positions, 64/4 heads of 128": {"deterministic": 6.39, "cudnn": 7.31, "flash": 13.34},
    "sm90: 4096 positions, 128/128 heads of 192, values of 128": {"deterministic": 18.1, "cudnn": 22.2},
}


def timing_key(capability: Capability, shape: AttentionShape) -> str:
    major, minor = capability
    return f"sm{major}{minor}: {shape}"


def timing_cache_path() -> Path:
    in_home = Path.home() / ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or in_home
    return Path(base) / "moefold" / "attention.json"


def known_times(capability: Capability, shape: AttentionShape) -> AttentionTimes:
    """The times measured for this shape on such a GPU; empty if there are none."""
    key = timing_key(capability, shape)
    for timings in (LEARNT, SHIPPED):
        if timings.get(key):
            return timings[key]
    cached = cached_timings()
    return cached.get(key) or {}


def cached_timings() -> dict[str, AttentionTimes]:
    """Times from the file in the cache folder, under today's names. An unreadable file counts as empty."""
    try:
        text = timing_cache_path().read_text()
        timings = json.loads(text)
    except (OSError, ValueError):
        return {}
    if not isinstance(timings, dict):
        return {}
    return {key: with_current_names(times) for key, times in timings.items()}


def with_current_names(times: AttentionTimes) -> AttentionTimes:
    return {current_name(name): time for name, time in times.items()}


def remember_times(capability: Capability, shape: AttentionShape, times: AttentionTimes) -> None:
    """Keep times for this run and the next ones; where the file cannot be written, the next run measures again."""
    key = timing_key(capability, shape)
    LEARNT[key] = times
    path = timing_cache_path()
    timings = cached_timings() | LEARNT
    try:
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        text = json.dumps(timings, indent=1)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        return
