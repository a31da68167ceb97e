"""Probe of links: every pair of ranks exchanges a message, and the time is taken.

Ranks meet in rounds, each with another partner in every round, so that all pairs of a round are at work at once:

    round 0    0-3  1-2        round 1    1-3  0-2        round 2    2-3  0-1

Before the message that is timed, a pair exchanges an empty one: neither waits then for a partner who is late. Of very
many ranks the first one of each node takes part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.host_objects import gather_objects
from moefold.comm.p2p import staged_through_host
from moefold.layout.axes import Axis, World
from moefold.watch.position import note_collective

PROBE_BYTES = {"cpu": 128 << 10, "cuda": 4 << 20}
REPETITIONS = 2  # the first message may open a connection
MOST_RANKS = 64

Seconds = dict[tuple[int, int], float]  # of a message each way, by the pair of ranks, the smaller one first


def probe_links(world: World) -> Seconds:
    """The seconds of all pairs of ranks on rank 0, nothing on the others. Every rank calls this."""
    members = probed_ranks(world.size, world.node_size)
    own: dict[int, float] = {}
    if world.rank in members:
        own = probe_partners(members, world)
    found: Seconds = {}
    for rank, seconds_by_partner in enumerate(gather_objects(own, world.everyone) or []):
        for partner, seconds in seconds_by_partner.items():
            pair = min(rank, partner), max(rank, partner)
            found[pair] = max(seconds, found.get(pair, 0.0))
    return found


def probed_ranks(size: int, node_size: int) -> list[int]:
    return list(range(0, size, node_size if size > MOST_RANKS else 1))


def probe_partners(members: Sequence[int], world: World) -> dict[int, float]:
    """The seconds of this rank's messages, by its partner."""
    note_collective("probe of links", world.everyone.name)
    count = len(members)
    place = members.index(world.rank)
    message = torch.zeros(PROBE_BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    found: dict[int, float] = {}
    for number in range(rounds_of(count)):
        partner = partner_in_round(place, number, count)
        if partner is not None:
            rank = members[partner]
            found[rank] = exchange_seconds(message, rank, world.everyone)
    return found


def rounds_of(count: int) -> int:
    """An odd number of rounds, in which each of `count` members meets every other one once."""
    return count if count % 2 else count - 1


def partner_in_round(place: int, number: int, count: int) -> int | None:
    """Members whose places add up to the number of the round meet; who would meet itself meets the last one, or where
    the count is odd nobody."""
    rounds = rounds_of(count)
    last = rounds
    if place == last:
        return number * (rounds + 1) // 2 % rounds
    partner = (number - place) % rounds
    if partner == place:
        partner = last
    return partner if partner < count else None


def exchange_seconds(message: Tensor, rank: int, axis: Axis) -> float:
    """The least seconds of the message to and from a rank, of a few."""
    empty = message[:1]
    times: list[float] = []
    for _ in range(REPETITIONS):
        exchange(empty, rank, axis)
        begun = time.perf_counter()
        exchange(message, rank, axis)
        times.append(time.perf_counter() - begun)
    return min(times)


def exchange(message: Tensor, rank: int, axis: Axis) -> None:
    sent = staged_through_host(message, axis)
    received = torch.empty_like(sent)
    group: Any = axis.group
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, rank, group=group), dist.P2POp(dist.irecv, received, rank, group=group)]
    )
    for work in works:
        work.wait()
    if received.is_cuda:
        torch.cuda.synchronize(received.device)
