"""What a dispatcher costs, predicted, torch-free: t = latency x hops + bytes / bandwidth.

Constants follow published measurements on NVLink and InfiniBand nodes: a plain all-to-all reaches 0.79 of NVLink and
0.90 of the network's peak; one that sends a token once per rank or node runs at about peak; a hop costs 155 us.
Of K choices over g places, g (1 - (1 - 1/g)^K) are distinct on average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moefold.anatomy.steps import travelling_width
from moefold.config.run import Config

LATENCY = 155e-6


@dataclass(frozen=True)
class Links:
    """Bytes a second that one rank sends inside its node and between nodes."""

    inside: float = 450e9
    network: float = 50e9


@dataclass(frozen=True)
class Trip:
    """What must travel: `tokens` of `row` bytes with k choices each, over `ranks` of which `inside` share a node."""

    tokens: int
    row: int
    k: int
    ranks: int
    inside: int


def distinct(k: int, places: float) -> float:
    return places * (1 - (1 - 1 / places) ** k)


def spread(copies: float, trip: Trip, inside_rate: float, network_rate: float) -> float:
    """Seconds to send so many copies of every token evenly over all ranks; both links work at the same time."""
    sent = trip.tokens * trip.row * copies / trip.ranks
    return max(sent * (trip.inside - 1) / inside_rate, sent * (trip.ranks - trip.inside) / network_rate)


def seconds(name: str, trip: Trip, links: Links) -> float:
    """One way; the way back costs the same."""
    if name == "all_gather":
        return LATENCY + spread(trip.ranks, trip, links.inside, links.network)
    if name == "all_to_all":
        return LATENCY + spread(trip.k, trip, 0.79 * links.inside, 0.90 * links.network)
    if name == "dedup":
        return LATENCY + spread(distinct(trip.k, trip.ranks), trip, links.inside, links.network)
    nodes = trip.ranks / trip.inside
    across = trip.tokens * trip.row * distinct(trip.k, nodes) * (nodes - 1) / nodes / links.network
    within = trip.tokens * trip.row * distinct(trip.k, trip.ranks) * (trip.inside - 1) / trip.inside / links.inside
    return LATENCY * 2 + across + within


def choose(config: Config, ranks_on_a_node: int, bytes_each: int, links: Links | None = None) -> tuple[str, str]:
    """The dispatcher to use and why: what the user asks for, else the least predicted time."""
    p, moe = config.parallel, config.model.moe
    if p.ep * p.etp == 1:
        return "local", "all experts are on this rank"
    if p.dispatcher != "auto":
        return p.dispatcher, "asked for"
    tokens = config.train.micro_batch * config.data.seq_len // (p.cp * p.tp)
    inside = max(1, min(p.ep, ranks_on_a_node // p.etp))
    trip = Trip(
        tokens, travelling_width(config.model) * bytes_each, moe.top_k, p.ep, inside if p.ep % inside == 0 else p.ep
    )
    names = ["dedup", "all_gather", "all_to_all", *(["hierarchical"] if trip.inside < trip.ranks else [])]
    joint = replace(trip, ranks=p.ep * p.etp, inside=min(p.ep * p.etp, ranks_on_a_node))  # all_gather joins etp too
    times = {n: seconds(n, joint if n == "all_gather" else trip, links or Links()) for n in names}
    order = sorted(times, key=lambda name: times[name])
    said = ", ".join(f"{name} {times[name] * 1e3:.2f}" for name in order)
    return order[0], f"least predicted time, ms one way for {tokens} tokens: {said}"
