"""Copies between host and device: what is read is what was sent, and asking for it waits for nothing."""

from __future__ import annotations

import time

import pytest
import torch

from moefold.comm.host_copies import DeviceTime, ToHost, UploadStream, integers_on_device

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_on_a_cpu_everything_is_there_at_once():
    x = torch.arange(5.0)
    assert ToHost(x).read() is x
    assert integers_on_device([3, 4], CPU).tolist() == [3, 4]
    (taken,) = UploadStream(CPU).begin([x]).take()
    assert taken is x


def test_seconds_between_two_moments_are_those_of_the_clock():
    first = DeviceTime(CPU)
    time.sleep(0.02)
    assert 0.02 <= first.seconds_until(DeviceTime(CPU)) < 2


@pytest.mark.gpu
@gpu
def test_on_a_device_nothing_is_waited_for_until_it_is_read():
    cuda = torch.device("cuda")
    uploads, host = UploadStream(cuda), torch.arange(1 << 16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begun = DeviceTime(cuda)
        (here,) = uploads.begin([host]).take()
        fetched = ToHost(here * 2 + integers_on_device([1], cuda))
        ended = DeviceTime(cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(fetched.read(), host * 2 + 1)
    assert begun.seconds_until(ended) > 0
