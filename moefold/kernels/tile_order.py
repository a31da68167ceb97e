"""In which order a grouped GEMM walks its tiles: bands of so many rows of tiles, by a table or by trying.

Tiles in flight should share operands in the second-level cache. What is best depends on the card and on the shape, in
classes of about twice the size. The table has what was measured (docs/benchmarks/notes.md); a class it does not have is
timed once, at its first use. The order changes no result, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import log2
from typing import NamedTuple

import torch

BANDS = (4, 8, 16, 32)


class Shape(NamedTuple):
    """A class of products: what they multiply and how results end, rows of an expert, columns of the result."""

    contraction: str
    end: str
    rows: int
    columns: int


def shape_of(contraction: str, end: str, rows: int, experts: int, columns: int) -> Shape:
    return Shape(contraction, end, to_power(rows // experts), to_power(columns))


def to_power(size: int) -> int:
    """The nearest power of two, in the sense of a ratio."""
    return 1 << round(log2(max(size, 1)))


TABLE: dict[str, dict[Shape, int]] = {
    "NVIDIA H200": {
        Shape("nt", "swiglu", 1024, 2048): 4,
        Shape("nt", "swiglu", 1024, 4096): 4,
        Shape("nt", "swiglu", 2048, 2048): 4,
        Shape("nt", "swiglu", 2048, 32768): 16,
        Shape("nt", "plain", 1024, 2048): 4,
        Shape("nt", "plain", 1024, 8192): 4,
        Shape("nt", "plain", 2048, 2048): 4,
        Shape("nt", "plain", 2048, 4096): 4,
        Shape("nn", "dswiglu", 1024, 1024): 4,
        Shape("nn", "dswiglu", 1024, 2048): 4,
        Shape("nn", "dswiglu", 2048, 1024): 8,
        Shape("nn", "dswiglu", 2048, 16384): 8,
        Shape("nn", "plain", 1024, 2048): 4,
        Shape("nn", "plain", 1024, 8192): 4,
        Shape("nn", "plain", 2048, 2048): 4,
        Shape("nn", "plain", 2048, 4096): 16,
        Shape("tn", "plain", 1024, 1024): 4,
        Shape("tn", "plain", 1024, 2048): 4,
        Shape("tn", "plain", 1024, 8192): 16,
        Shape("tn", "plain", 2048, 1024): 4,
        Shape("tn", "plain", 2048, 2048): 8,
        Shape("tn", "plain", 2048, 4096): 16,
        Shape("tn", "plain", 2048, 16384): 16,
    },
}
LEARNED: dict[tuple[str, Shape], int] = {}


def band_for(shape: Shape, device: torch.device, launch: Callable[[int], object] | None) -> int:
    """How many rows of tiles to walk together. `launch` does the product with a given number, or is None where doing it
    more than once would be wrong; then, and while waiting for the device is not allowed, a class that is not known gets
    what suits most."""
    card = card_of(device)
    known = TABLE.get(card, {}).get(shape) or LEARNED.get((card, shape))
    if known is None and launch is not None and may_wait():
        known = LEARNED[card, shape] = fastest(BANDS, launch, milliseconds_of)
    return known or BANDS[0]


@cache
def card_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def may_wait() -> bool:
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0


def fastest(
    bands: tuple[int, ...], launch: Callable[[int], object], time: Callable[[Callable[[], object]], float]
) -> int:
    """The band with the best of a few rounds. Rounds go over all bands in turn: a card that slows down as it gets warm
    slows them all."""
    best = dict.fromkeys(bands, float("inf"))
    for _ in range(5):
        for band in bands:
            best[band] = min(best[band], time(lambda band=band: launch(band)))
    return min(best, key=lambda band: best[band])


def milliseconds_of(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
