"""The order of a grouped GEMM's tiles: bands of so many rows of tiles, from a table or by autotuning.

Tiles in flight should share operands in the L2 cache. The best band depends on the GPU and on the shape, in classes of
about twice the size. The table holds measured classes (docs/benchmarks/notes.md); any other class is timed once, at its
first use. The order changes no result, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import log2
from typing import NamedTuple

import torch

BANDS = (4, 8, 16, 32)


class GemmShapeClass(NamedTuple):
    """A class of grouped GEMMs: contraction, epilogue, rows of an expert, columns of the output."""

    contraction: str
    end: str
    rows: int
    columns: int


def gemm_shape_class(contraction: str, end: str, rows: int, experts: int, columns: int) -> GemmShapeClass:
    rows_class = nearest_power_of_two(rows // experts)
    columns_class = nearest_power_of_two(columns)
    return GemmShapeClass(contraction, end, rows_class, columns_class)


def nearest_power_of_two(size: int) -> int:
    """The nearest power of two, in the sense of a ratio."""
    exponent = log2(max(size, 1))
    return 1 << round(exponent)


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
    """The number of tile rows in a band. `launch` runs the GEMM with a given band, or is None where running it
    twice would be wrong; then, and while synchronising is not allowed, an unknown class gets the most common band."""
    gpu = gpu_device_name(device)
    measured = MEASURED_BANDS.get(gpu, {})
    band = measured.get(shape) or TRIED_BANDS.get((gpu, shape))
    if band is None and launch is not None and may_synchronize():
        band = fastest_band(BANDS, launch, elapsed_milliseconds)
        TRIED_BANDS[gpu, shape] = band
    return band or BANDS[0]


@cache
def gpu_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def may_synchronize() -> bool:
    if torch.cuda.is_current_stream_capturing():
        return False
    return torch.cuda.get_sync_debug_mode() == 0


def fastest_band(
    bands: tuple[int, ...], launch: Callable[[int], object], time: Callable[[Callable[[], object]], float]
) -> int:
    """The band with the shortest of five times. Rounds go over all bands in turn: a GPU that slows down as it gets warm
    slows them all."""
    best = dict.fromkeys(bands, float("inf"))
    for _ in range(5):
        for band in bands:
            elapsed = time(partial(launch, band))
            best[band] = min(best[band], elapsed)
    return min(bands, key=best.__getitem__)


def elapsed_milliseconds(work: Callable[[], object]) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
