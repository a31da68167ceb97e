"""Gloo with one network thread for all process groups of a process.

torch gives every group a device of its own, with a thread that wakes a hundred times a second. A run has a dozen
groups; with several ranks on a few cores these threads take a good part of the time.
GLOO_SOCKET_IFNAME names the network interface, as for torch's own devices; of several the first is taken.
"""

from __future__ import annotations

import datetime
import os
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

Gloo = distributed_c10d.ProcessGroupGloo


@cache
def shared_device() -> Gloo.Device:
    interface, *_ = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if interface:
        return Gloo.create_device(interface=interface)
    return Gloo.create_default_device()


class SharedDeviceGloo(Gloo):
    """A process group of Gloo on the device that all groups share."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        options: Any = Gloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs lack it
        options._devices = [shared_device()]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """Have torch create groups of Gloo on one device from now on; torch itself takes no options for Gloo."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
