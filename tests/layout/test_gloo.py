"""Process groups of a process share one network thread of Gloo, on the interface that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.layout.axes import World
from moefold.layout.gloo import shared_device
from tests.support.ranks import run_ranks


def network_threads() -> int:
    names = [Path(f"/proc/self/task/{thread}/comm") for thread in os.listdir("/proc/self/task")]
    return sum(name.read_text().startswith("gloo_tcp") for name in names if name.exists())


def groups_and_threads(world: World) -> tuple[float, str, int]:
    groups = [dist.new_group([0, 1]) for _ in range(5)]
    values = torch.ones(3)
    for group in groups:
        dist.all_reduce(values, group=group)
    return values[0].item(), dist.get_backend(groups[0]), network_threads()


def test_five_more_groups_start_no_network_thread_and_work():
    for value, backend, threads in run_ranks(groups_and_threads, 2):
        assert value == 2.0**5
        assert backend == "gloo"
        assert threads == 1


def test_the_interface_of_the_environment_is_used_and_one_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    make_device = shared_device.__wrapped__
    for names in ("", "lo", "lo,nowhere9"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        assert make_device() is not None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9")
    with pytest.raises(RuntimeError, match="nowhere9"):
        make_device()
