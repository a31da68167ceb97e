"""Known links and prices of this machine, read without torch, where no ranks are there to measure them."""

from __future__ import annotations

import ctypes
from pathlib import Path

from moefold.dispatch.catalog import CPU_LINKS, LinkSpeeds
from moefold.kernels.facts import cuda_driver
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import Gpu, find_gpu_by_name, match_gpu_name, read_gpu_file

LONGEST_NAME = 256
CPU_RANK = Path(__file__).with_name("cpu_rank.yaml")
USUAL_GPU = "h100"


def known_links(device: str, gpu_name: str) -> LinkSpeeds:
    """Links of a device: on cuda, those of the planner's GPU of this name, or those of an H100 where the planner does
    not know the name."""
    if device == "cpu":
        return CPU_LINKS
    name = match_gpu_name(gpu_name)
    if name is None:
        return LinkSpeeds()
    gpu = find_gpu_by_name(name)
    return Cluster(gpu, gpu.domain).link_bandwidths


def known_gpu(device: str, gpu_name: str) -> Gpu:
    """Prices of a device: of the planner's GPU of this name, or of an H100 where the planner does not know the name; of
    a CPU in round numbers."""
    if device == "cpu":
        return read_gpu_file(CPU_RANK)
    name = match_gpu_name(gpu_name) or USUAL_GPU
    return find_gpu_by_name(name)


def first_gpu_name() -> str:
    """The driver's name of the first GPU; empty where there is no GPU."""
    found = cuda_driver()
    if found is None:
        return ""
    driver, _ = found
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(LONGEST_NAME)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, LONGEST_NAME, device)
    return name.value.decode(errors="replace")
