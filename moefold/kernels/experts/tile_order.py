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


class GemmShapeClass(NamedTuple):
    """A class of products: what they multiply and how results end, rows of an expert, columns of the result."""

    contraction: str
    end: str
    rows: int
    columns: int


def gemm_shape_class(contraction: str, end: str, rows: int, experts: int, columns: int) -> GemmShapeClass:
    return GemmShapeClass(contraction, end, nearest_power_of_two(rows // experts), nearest_power_of_two(columns))


def nearest_power_of_two(size: int) -> int:
    """The nearest power of two, in the sense of a ratio."""
    return 1 << round(log2(max(size, 1)))


MEASURED_BANDS: dict[str, dict[GemmShapeClass, int]] = {
    "NVIDIA H200": {
        GemmShapeClass("nt", "swiglu", 1024, 2048): 4,
        GemmShapeClass("nt", "swiglu", 1024, 4096): 4,
        GemmShapeClass("nt", "swiglu", 2048, 2048): 4,
        GemmShapeClass("nt", "swiglu", 2048, 32768): 16,
        GemmShapeClass("nt", "plain", 1024, 2048): 4,
        GemmShapeClass("nt", "plain", 1024, 8192): 4,
        GemmShapeClass("nt", "plain", 2048, 2048): 4,
        GemmShapeClass("nt", "plain", 2048, 4096): 4,
        GemmShapeClass("nn", "dswiglu", 1024, 1024): 4,
        GemmShapeClass("nn", "dswiglu", 1024, 2048): 4,
        GemmShapeClass("nn", "dswiglu", 2048, 1024): 8,
        GemmShapeClass("nn", "dswiglu", 2048, 16384): 8,
        GemmShapeClass("nn", "plain", 1024, 2048): 4,
        GemmShapeClass("nn", "plain", 1024, 8192): 4,
        GemmShapeClass("nn", "plain", 2048, 2048): 4,
        GemmShapeClass("nn", "plain", 2048, 4096): 16,
        GemmShapeClass("tn", "plain", 1024, 1024): 4,
        GemmShapeClass("tn", "plain", 1024, 2048): 4,
        GemmShapeClass("tn", "plain", 1024, 8192): 16,
        GemmShapeClass("tn", "plain", 2048, 1024): 4,
        GemmShapeClass("tn", "plain", 2048, 2048): 8,
        GemmShapeClass("tn", "plain", 2048, 4096): 16,
        GemmShapeClass("tn", "plain", 2048, 16384): 16,
    },
}
TRIED_BANDS: dict[tuple[str, GemmShapeClass], int] = {}


def band_for_shape(shape: GemmShapeClass, device: torch.device, launch: Callable[[int], object] | None) -> int:
    """How many rows of tiles to walk together. `launch` does the product with a given number, or is None where doing it
    more than once would be wrong; then, and while waiting for the device is not allowed, a class that is not known gets
    what suits most."""
    card = gpu_device_name(device)
    known = MEASURED_BANDS.get(card, {}).get(shape) or TRIED_BANDS.get((card, shape))
    if known is None and launch is not None and may_synchronize():
        known = TRIED_BANDS[card, shape] = fastest_band(BANDS, launch, elapsed_milliseconds)
    return known or BANDS[0]


@cache
def gpu_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def may_synchronize() -> bool:
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0


def fastest_band(
    bands: tuple[int, ...], launch: Callable[[int], object], time: Callable[[Callable[[], object]], float]
) -> int:
    """The band with the best of a few rounds. Rounds go over all bands in turn: a card that slows down as it gets warm
    slows them all."""
    best = dict.fromkeys(bands, float("inf"))
    for _ in range(5):
        for band in bands:
            best[band] = min(best[band], time(lambda band=band: launch(band)))
    return min(best, key=lambda band: best[band])


def elapsed_milliseconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
