"""This machine's memory, read without torch: of its GPUs from the driver, of the host from /proc and cgroups."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moefold.kernels.facts import cuda_driver

KIB = 1024
UNLIMITED = 1 << 60  # cgroups write such a number, or "max", where there is no limit
LIMIT_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # by controller: version 2 has no name


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of each GPU that this process may use, and of the host; None where it cannot be read."""

    gpus: tuple[int, ...]
    host: int | None

    def scaled(self, share: float) -> MachineMemory:
        """A machine with this share of every memory."""
        gpus = tuple(int(share * size) for size in self.gpus)
        host = self.host
        if host is not None:
            host = int(share * host)
        return MachineMemory(gpus, host)


def this_machine() -> MachineMemory:
    return MachineMemory(gpu_memories(), host_memory())


def gpu_memories() -> tuple[int, ...]:
    """Memory of every GPU that CUDA_VISIBLE_DEVICES leaves to this process, in the order of torch."""
    found = cuda_driver()
    if found is None:
        return ()
    driver, count = found
    memories: list[int] = []
    for number in range(count):
        device = ctypes.c_int()
        size = ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        memories.append(size.value)
    return tuple(memories)


def host_memory(root: Path = Path("/")) -> int | None:
    """Memory that processes of this container may use: that of the machine, or the smallest limit of its cgroups."""
    physical = physical_memory(root / "proc" / "meminfo")
    if physical is None:
        return None
    return min([physical, *cgroup_limits(root)])


def physical_memory(meminfo: Path) -> int | None:
    """`MemTotal:  24689632 kB` -> bytes."""
    try:
        text = meminfo.read_text()
    except OSError:  # a system without /proc
        return None
    found = re.search(r"^MemTotal:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * KIB if found else None


def cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of this process's cgroups and of those above them. A container may see its own cgroup as the root."""
    try:
        file = root / "proc" / "self" / "cgroup"
        memberships = file.read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        for controller in controllers.split(","):
            if controller in LIMIT_FILES:
                mount = root / "sys" / "fs" / "cgroup" / controller
                yield from limits_up_to(mount, path, LIMIT_FILES[controller])


def limits_up_to(mount: Path, path: str, name: str) -> Iterator[int]:
    folder = mount / path.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(mount):
            return
        limit = read_limit(group / name)
        if limit is not None:
            yield limit


def read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    if not text.isdecimal():
        return None
    limit = int(text)
    return limit if limit < UNLIMITED else None
