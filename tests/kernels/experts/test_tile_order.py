"""The order of tiles: known classes by the table, others by trying, and never a wait where none is allowed."""

from __future__ import annotations

import pytest
import torch

from moefold.kernels.experts import tile_order
from moefold.kernels.experts.tile_order import (
    BANDS,
    GemmShapeClass,
    band_for_shape,
    fastest_band,
    gemm_shape_class,
    nearest_power_of_two,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("size", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (90, 64), (91, 128), (1023, 1024), (1025, 1024)]
)
def test_sizes_fall_into_classes_of_about_twice_the_size(size: int, power: int):
    assert nearest_power_of_two(size) == power


def test_the_class_is_that_of_an_expert_and_not_of_how_many_there_are():
    assert gemm_shape_class("nt", "swiglu", 16 * 1100, 16, 1536) == gemm_shape_class(
        "nt", "swiglu", 128 * 1000, 128, 2000
    )
    assert gemm_shape_class("nt", "swiglu", 1024, 8, 1536) != gemm_shape_class("nt", "plain", 1024, 8, 1536)


def test_the_fastest_band_is_found_though_everything_gets_slower():
    costs, calls = {4: 1.3, 8: 1.2, 16: 1.1, 32: 1.4}, []

    def time(work) -> float:
        work()
        return costs[calls[-1]] * (1 + 0.05 * len(calls))  # the last round is twice as slow as the first

    assert fastest_band(BANDS, calls.append, time) == 16


@needs_gpu
@pytest.mark.gpu
def test_an_unknown_class_is_tried_once_and_not_where_waiting_is_an_error():
    device, calls = torch.device("cuda"), []
    shape = GemmShapeClass("nt", "plain", 3, 5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert band_for_shape(shape, device, calls.append) in BANDS
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert band_for_shape(shape, device, None) in BANDS
    assert not calls
    first = band_for_shape(shape, device, calls.append)
    tried = len(calls)
    assert set(calls) == set(BANDS)
    assert band_for_shape(shape, device, calls.append) == first
    assert len(calls) == tried
    del tile_order.TRIED_BANDS[torch.cuda.get_device_name(device), shape]


def test_the_table_names_bands_that_could_be_tried():
    assert all(band in BANDS for table in tile_order.MEASURED_BANDS.values() for band in table.values())
    for table in tile_order.MEASURED_BANDS.values():
        for shape in table:
            assert nearest_power_of_two(shape.rows) == shape.rows
            assert nearest_power_of_two(shape.columns) == shape.columns
