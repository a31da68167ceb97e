"""A meter reads what the driver of a GPU tells, and nothing elsewhere."""

import time
from ctypes import CDLL

import pytest
import torch

from moefold.observe.gpu_meter import FIGURES, LIBRARY, SECONDS_APART, GpuMeter


def has_driver() -> bool:
    try:
        CDLL(LIBRARY)
    except OSError:
        return False
    return True


def test_a_cpu_has_no_figures():
    assert GpuMeter(torch.device("cpu")).read() == {}


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
def test_there_are_none_without_the_library_of_a_driver():
    assert GpuMeter(torch.device("cuda", 0)).read() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_figures_of_a_gpu_are_those_of_a_card_that_works():
    device = torch.device("cuda", torch.cuda.current_device())
    meter = GpuMeter(device)
    x = torch.ones(4096, 4096, device=device)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        x @ x
        torch.cuda.synchronize()
    figures = meter.read()
    assert figures.keys() == FIGURES.keys()
    assert 10 < figures["gpu_watts"] < 5000
    assert 10 < figures["gpu_celsius"] < 120
    assert 0.5 < figures["gpu_busy"] <= 1, "it multiplied for two seconds"
    assert 100 < figures["gpu_mhz"] < 10_000
    assert meter.read() == {}, "a second has not passed"
    time.sleep(SECONDS_APART)
    assert meter.read().keys() == FIGURES.keys()
