"""What a dispatcher costs, predicted, torch-free: t = latency x hops + bytes / bandwidth.

Constants follow published measurements on NVLink and InfiniBand nodes: a plain all-to-all reaches 0.79 of NVLink and
0.90 of the network's peak; one that sends a token once per rank or node runs at about peak. A collective or a hop over
the network costs 155 us; a kernel that writes to its peers over NVLink costs 30 us for every doubling of them. Of K
choices over g places, g (1 - (1 - 1/g)^K) are distinct on average; fewer where routing is limited to groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb, log2

from moefold.anatomy.step_specs import dispatched_width
from moefold.config.run import Config

HOP_LATENCY = 155e-6
LATENCY_PER_DOUBLING = 30e-6  # for every doubling of the ranks that one kernel writes to


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes a second that one rank sends inside its node and between nodes."""

    inside: float = 450e9
    network: float = 50e9


@dataclass(frozen=True)
class DispatchTrip:
    """What must travel: `tokens` of `row` bytes with k choices each, over `ranks` of which `inside` share a node. The
    choices lie in `chosen` of `groups` groups of experts."""

    tokens: int
    row: float
    k: int
    ranks: int
    inside: int
    groups: int = 1
    chosen: int = 1

    @property
    def nodes(self) -> float:
        return self.ranks / self.inside


def expected_distinct(k: int, places: float) -> float:
    return places * (1 - (1 - 1 / places) ** k)


def expected_nodes_reached(trip: DispatchTrip) -> float:
    """On how many nodes the experts of a token lie. With groups, on those that hold a chosen group: of the C(groups,
    chosen) ways to choose, C(groups - held, chosen) leave a node out that holds `held` of them."""
    if trip.chosen >= trip.groups or trip.groups % trip.nodes:
        return expected_distinct(trip.k, trip.nodes)
    held = int(trip.groups // trip.nodes)
    return trip.nodes * (1 - comb(trip.groups - held, trip.chosen) / comb(trip.groups, trip.chosen))


def even_spread_seconds(copies: float, trip: DispatchTrip, inside_rate: float, network_rate: float) -> float:
    """Seconds to send so many copies of every token evenly over all ranks; both links work at the same time."""
    sent = trip.tokens * trip.row * copies / trip.ranks
    return max(sent * (trip.inside - 1) / inside_rate, sent * (trip.ranks - trip.inside) / network_rate)


def dispatch_seconds(name: str, trip: DispatchTrip, links: LinkSpeeds) -> float:
    """One way; the way back costs the same."""
    if name == "all_gather":
        return HOP_LATENCY + even_spread_seconds(trip.ranks, trip, links.inside, links.network)
    if name == "all_to_all":
        return HOP_LATENCY + even_spread_seconds(trip.k, trip, 0.79 * links.inside, 0.90 * links.network)
    if name == "dedup":
        wait = LATENCY_PER_DOUBLING * log2(trip.ranks) if trip.ranks <= trip.inside else HOP_LATENCY
        return wait + even_spread_seconds(expected_distinct(trip.k, trip.ranks), trip, links.inside, links.network)
    across = trip.tokens * trip.row * expected_nodes_reached(trip) * (trip.nodes - 1) / trip.nodes / links.network
    within = (
        trip.tokens * trip.row * expected_distinct(trip.k, trip.ranks) * (trip.inside - 1) / trip.inside / links.inside
    )
    return HOP_LATENCY * 2 + max(across, within)  # what has arrived is handed on while more arrives


def seconds_by_dispatcher(config: Config, ranks_on_a_node: int, bytes_each: int, links: LinkSpeeds) -> dict[str, float]:
    """Seconds one way by every dispatcher that this layout allows."""
    p, moe = config.parallel, config.model.moe
    tokens = config.train.micro_batch * config.data.seq_len // (p.cp * p.tp)
    inside = max(1, min(p.ep, ranks_on_a_node // p.etp))
    trip = DispatchTrip(
        tokens,
        dispatched_width(config.model) * bytes_each,
        moe.top_k,
        p.ep,
        inside if p.ep % inside == 0 else p.ep,
        moe.router.groups,
        moe.router.groups_chosen,
    )
    names = ["dedup", "all_gather", "all_to_all", *(["hierarchical"] if trip.inside < trip.ranks else [])]
    joint = replace(trip, ranks=p.ep * p.etp, inside=min(p.ep * p.etp, ranks_on_a_node))  # all_gather joins etp too
    return {n: dispatch_seconds(n, joint if n == "all_gather" else trip, links) for n in names}


def cheapest_dispatcher(
    config: Config, ranks_on_a_node: int, bytes_each: int, links: LinkSpeeds | None = None
) -> tuple[str, str]:
    """The dispatcher to use and why: what the user asks for, else the least predicted time."""
    p = config.parallel
    if p.ep * p.etp == 1:
        return "local", "all experts are on this rank"
    if p.dispatcher != "auto":
        return p.dispatcher, "asked for"
    found = seconds_by_dispatcher(config, ranks_on_a_node, bytes_each, links or LinkSpeeds())
    order = sorted(found, key=lambda name: found[name])
    said = ", ".join(f"{name} {found[name] * 1e3:.2f}" for name in order)
    tokens = config.train.micro_batch * config.data.seq_len // (p.cp * p.tp)
    return order[0], f"least predicted time, ms one way for {tokens} tokens: {said}"


def predicted_one_way(config: Config, ranks_on_a_node: int, bytes_each: int, links: LinkSpeeds) -> tuple[str, float]:
    """The dispatcher a run would use and its seconds. DeepEP sends a token once a rank inside a node and once a node
    beyond it, whichever is needed."""
    found = seconds_by_dispatcher(config, ranks_on_a_node, bytes_each, links)
    name = cheapest_dispatcher(config, ranks_on_a_node, bytes_each, links)[0]
    if name == "deepep" or name not in found:
        name = "hierarchical" if "hierarchical" in found else "dedup"
    return name, found[name]
