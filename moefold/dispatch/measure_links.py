"""Measurement of the links between expert-parallel ranks, for the choice of a dispatcher.

Ranks time an all-to-all of two sizes over the groups that a dispatcher uses: those inside a node and those across
nodes, where a group has more than one rank. All groups are timed at once, as all of them send at once in a step. The
time of a size is the median of a few repetitions, on the slowest rank of all. With t = latency + bytes / bandwidth, two
sizes give both figures, the same on every rank.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch

from moefold.comm import collectives
from moefold.dispatch.catalog import LinkSpeeds
from moefold.layout.axes import Axis, World

MIB = 1 << 20
# Bytes of a rank, its own share among them: few enough for a fraction of a second, enough to outweigh the latency.
TRIAL_BYTES = {
    "cpu": (MIB // 16, MIB),
    "cuda": (MIB, 64 * MIB),
}
REPETITIONS = 5
WARM_UP = 2  # the first all-to-all of a group also opens its connections
LEAST_GROWTH = 0.1  # of the larger time: where noise hides the difference of both


class Link(NamedTuple):
    """Bytes/s that a rank sends in an all-to-all, and seconds of one without bytes."""

    bandwidth: float
    latency: float


def measure_links(world: World) -> LinkSpeeds:
    """The links of the expert-parallel ranks; every rank calls this. Links that join no two of them get the figures of
    the others."""
    inside = measure_link(world.ep_inside, world)
    network = measure_link(world.ep_nodes, world)
    inside = inside or network
    network = network or inside
    if inside is None or network is None:
        raise ValueError("links are measured between expert-parallel ranks, but ep is 1")
    return LinkSpeeds(
        inside=inside.bandwidth,
        network=network.bandwidth,
        inside_latency=inside.latency,
        network_latency=network.latency,
        measured=True,
    )


def measure_link(axis: Axis, world: World) -> Link | None:
    """The link between the ranks of an axis; None where the axis has one rank."""
    if axis.size == 1:
        return None
    device = world.device
    trials = TRIAL_BYTES[device.type]
    shares = [size // axis.size for size in trials]  # for each rank
    own = [all_to_all_seconds(share, axis, device) for share in shares]
    slowest = torch.tensor(own, dtype=torch.float64)
    collectives.all_reduce_max_no_grad(slowest, world.everyone)
    others = axis.size - 1
    sent = [share * others for share in shares]
    return fit_link(sent, slowest.tolist())


def all_to_all_seconds(bytes_each: int, axis: Axis, device: torch.device) -> float:
    """Median seconds of an all-to-all with `bytes_each` bytes for every rank."""
    counts = [bytes_each] * axis.size
    size = sum(counts)
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(WARM_UP + REPETITIONS):
        begun = time.perf_counter()
        collectives.all_to_all_no_grad(x, counts, counts, axis)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - begun
        times.append(elapsed)
    return median(times[WARM_UP:])


def fit_link(sizes: list[int], seconds: list[float]) -> Link:
    """The link by which both sizes take their seconds."""
    small, large = sizes
    sooner, later = seconds
    growth = max(later - sooner, LEAST_GROWTH * later)
    bandwidth = (large - small) / growth
    latency = max(0.0, sooner - small / bandwidth)
    return Link(bandwidth, latency)
