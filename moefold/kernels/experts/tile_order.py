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
Work = Callable[[], object]
LaunchWithBand = Callable[[int], object]


class GemmShapeClass(NamedTuple):
    """A class of grouped GEMMs: contraction, epilogue, rows of an expert, columns of the output."""

    contraction: str
    end: str
    rows: int
    columns: int


def gemm_shape_class(contraction: str, end: str, rows: int, experts: int, columns: int) -> GemmShapeClass:
    rows_of_expert = rows // experts
    rows_class = nearest_power_of_two(rows_of_expert)
    columns_class = nearest_power_of_two(columns)
    return GemmShapeClass(contraction, end, rows_class, columns_class)


def nearest_power_of_two(size: int) -> int:
    """The nearest power of two, in the sense of a ratio."""
    exponent = log2(max(size, 1))
    return 1 << round(exponent)


H200_BANDS = {  # by contraction and epilogue, then by rows of an expert and columns: the fastest band
    ("nt", "swiglu"): {
        (1024, 2048): 4,
        (1024, 4096): 4,
        (2048, 2048): 4,
        (2048, 32768): 16,
    },
    ("nt", "plain"): {
        (1024, 2048): 4,
        (1024, 8192): 4,
        (2048, 2048): 4,
        (2048, 4096): 4,
    },
    ("nn", "dswiglu"): {
        (1024, 1024): 4,
        (1024, 2048): 4,
        (2048, 1024): 8,
        (2048, 16384): 8,
    },
    ("nn", "plain"): {
        (1024, 2048): 4,
        (1024, 8192): 4,
        (2048, 2048): 4,
        (2048, 4096): 16,
    },
    ("tn", "plain"): {
        (1024, 1024): 4,
        (1024, 2048): 4,
        (1024, 8192): 16,
        (2048, 1024): 4,
        (2048, 2048): 8,
        (2048, 4096): 16,
        (2048, 16384): 16,
    },
}


def bands_by_class(table: dict[tuple[str, str], dict[tuple[int, int], int]]) -> dict[GemmShapeClass, int]:
    found: dict[GemmShapeClass, int] = {}
    for (contraction, end), bands in table.items():
        for (rows, columns), band in bands.items():
            shape = GemmShapeClass(contraction, end, rows, columns)
            found[shape] = band
    return found


MEASURED_BANDS = {"NVIDIA H200": bands_by_class(H200_BANDS)}
TRIED_BANDS: dict[tuple[str, GemmShapeClass], int] = {}


def band_for_shape(shape: GemmShapeClass, device: torch.device, launch: LaunchWithBand | None) -> int:
    """The number of tile rows in a band. `launch` runs the GEMM with a given band, or is None where running it
    twice would be wrong; then, and while synchronising is not allowed, an unknown class gets the most common band."""
    gpu = gpu_device_name(device)
    measured = MEASURED_BANDS.get(gpu, {})
    if shape in measured:
        return measured[shape]
    tried = (gpu, shape)
    if tried in TRIED_BANDS:
        return TRIED_BANDS[tried]
    if launch is None or not may_synchronize():
        return BANDS[0]
    band = fastest_band(BANDS, launch, elapsed_milliseconds)
    TRIED_BANDS[tried] = band
    return band


@cache
def gpu_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def may_synchronize() -> bool:
    if torch.cuda.is_current_stream_capturing():
        return False
    return torch.cuda.get_sync_debug_mode() == 0


def fastest_band(bands: tuple[int, ...], launch: LaunchWithBand, time: Callable[[Work], float]) -> int:
    """The band with the shortest of five times. Rounds go over all bands in turn: a GPU that slows down as it gets warm
    slows them all."""
    best = dict.fromkeys(bands, float("inf"))
    for _ in range(5):
        for band in bands:
            work = partial(launch, band)
            elapsed = time(work)
            best[band] = min(best[band], elapsed)
    return min(bands, key=best.__getitem__)


def elapsed_milliseconds(work: Work) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
