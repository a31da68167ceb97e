"""The NUMA node of a GPU: a process that runs on its cores launches kernels sooner and has pinned memory near the card.
From /sys alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

SYSTEM = Path("/sys")


def bind_to_gpu_node(device: torch.device) -> None:
    """Run this process on the cores of the GPU's NUMA node, as far as it may use them. Nothing changes on a CPU, or
    where the system tells no node."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    address = pci_address(device)
    allowed = os.sched_getaffinity(0)
    near = cores_near(address) & allowed
    if near:
        os.sched_setaffinity(0, near)


def pci_address(device: torch.device) -> str:
    """0000:18:00.0"""
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


def cores_near(address: str, system: Path = SYSTEM) -> set[int]:
    """The cores of the NUMA node of a PCI device; none where the node is unknown."""
    try:
        gpu = system / "bus/pci/devices" / address
        number = (gpu / "numa_node").read_text()
        node = int(number)
        if node < 0:
            return set()
        cores = (system / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return set()
    return set(core_numbers(cores))


def core_numbers(ranges: str) -> Iterator[int]:
    """The numbers of a list such as 0-3,8."""
    parts = ranges.strip().split(",")
    for part in filter(None, parts):
        first, _, last = part.partition("-")
        end = int(last or first) + 1
        yield from range(int(first), end)
