"""The cores near a GPU, as a system tells them."""

from __future__ import annotations

from pathlib import Path

import torch

from moefold.layout.numa import bind_to_gpu_node, cores_near

ADDRESS = "0000:18:00.0"


def system_with(folder: Path, node: str) -> Path:
    device = folder / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    cores = folder / "devices/system/node/node1"
    cores.mkdir(parents=True)
    (cores / "cpulist").write_text("4-6,12\n")
    return folder


def test_the_cores_of_the_node_are_read(tmp_path: Path):
    assert cores_near(ADDRESS, system_with(tmp_path, "1")) == {4, 5, 6, 12}


def test_no_cores_where_the_system_does_not_know(tmp_path: Path):
    assert cores_near(ADDRESS, tmp_path) == set()
    assert cores_near(ADDRESS, system_with(tmp_path, "-1")) == set()
    bind_to_gpu_node(torch.device("cpu"))  # changes nothing
