"""The catalog of dispatchers, torch-free: a line for each, its requirements, and its predicted seconds one way.

    t = latency x hops + bytes / bandwidth

Legal names and their lines are in config/open_names.py, which config, `--help` and this catalog read. Prices are
attached here and builders in dispatch/build.py. A dispatcher without a price is used only where it is set, not by auto.

Of K choices over g places, g (1 - (1 - 1/g)^K) are distinct on average; fewer where routing is limited to groups of
experts. Latency and bandwidth are those of the links (`LinkSpeeds`), which are measured or known:

    measured   through the all-to-all of the run itself (dispatch/measure_links.py), which is every hop's: bandwidth and
               latency are used as they are, and the hops of a dispatcher follow one another
    known      peaks of a data sheet, with constants of published measurements on NVLink and InfiniBand nodes: a plain
               all-to-all reaches 0.79 of NVLink and 0.90 of the network's peak; one that sends a token once per rank or
               node runs at about peak and forwards while it receives. A collective or a hop over the network costs
               155 us; a kernel that writes to its peers over NVLink costs 30 us for every doubling of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import comb, log2
from typing import NamedTuple

from moefold.config.extensions import find_extension
from moefold.config.open_names import DISPATCHER_NAMES

HOP_LATENCY = 155e-6
LATENCY_PER_DOUBLING = 30e-6  # for every doubling of the ranks that one kernel writes to
ALL_TO_ALL_OF_NVLINK = 0.79
ALL_TO_ALL_OF_NETWORK = 0.90


@dataclass(frozen=True)
class LinkSpeeds:
    """Bandwidth of one rank inside its node and between nodes, in bytes/s, and seconds of a hop over each. `source`: of
    known links, their owner."""

    inside: float = 450e9
    network: float = 50e9
    inside_latency: float = HOP_LATENCY
    network_latency: float = HOP_LATENCY
    measured: bool = False
    source: str = "H100"

    def in_words(self, trip: DispatchTrip) -> str:
        """The figures that a trip uses: `links measured: 3.2 GB/s, 80 us inside a node`. Latencies of known links
        differ by dispatcher."""
        figures: list[str] = []
        if trip.inside > 1:
            inside = self.link_in_words(self.inside, self.inside_latency)
            figures.append(f"{inside} inside a node")
        if not trip.on_one_node:
            network = self.link_in_words(self.network, self.network_latency)
            figures.append(f"{network} between nodes")
        origin = "measured" if self.measured else f"of {self.source}"
        listed = "; ".join(figures)
        return f"links {origin}: {listed}"

    def link_in_words(self, bandwidth: float, latency: float) -> str:
        text = f"{bandwidth / 1e9:.3g} GB/s"
        if self.measured:
            text += f", {latency * 1e6:.0f} us"
        return text


CPU_LINKS = LinkSpeeds(1e9, 1e9, source="gloo on CPUs, round numbers")


@dataclass(frozen=True)
class DispatchTrip:
    """The load of one dispatch: `tokens` of `row` bytes with k choices each, over `ranks` of which `inside` share a
    node. The choices lie in `chosen` of `groups` groups of experts."""

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

    @property
    def on_one_node(self) -> bool:
        return self.ranks <= self.inside

    @property
    def bytes(self) -> float:
        return self.tokens * self.row


Seconds = Callable[[DispatchTrip, LinkSpeeds], float]


class DispatcherEntry(NamedTuple):
    """`says`: one line. `needs`: in words, empty if nothing. `seconds`: one way, None if not predicted.
    `several_nodes`: only for ranks on several nodes. `joins_etp`: it sends over ep and etp ranks together.
    `on_request`: it has a price for plans, but is used only where it is set."""

    says: str
    needs: str = ""
    seconds: Seconds | None = None
    several_nodes: bool = False
    joins_etp: bool = False
    on_request: bool = False


def expected_distinct(k: int, places: float) -> float:
    missed = (1 - 1 / places) ** k
    return places * (1 - missed)


def expected_nodes_reached(trip: DispatchTrip) -> float:
    """Distinct nodes among a token's experts. With groups, the nodes that hold a chosen group: of the C(groups, chosen)
    ways to choose, C(groups - held, chosen) leave out a node that holds `held` groups."""
    groups = trip.groups
    nodes = trip.nodes
    if trip.chosen >= groups or groups % nodes:
        return expected_distinct(trip.k, nodes)
    held = int(groups // nodes)
    missed = comb(groups - held, trip.chosen)
    ways = comb(groups, trip.chosen)
    return nodes * (1 - missed / ways)


def even_spread_seconds(copies: float, trip: DispatchTrip, links: LinkSpeeds) -> float:
    """Seconds to send `copies` copies of every token evenly over all ranks; both links are used at the same time."""
    sent = trip.bytes * copies / trip.ranks
    ranks_inside = trip.inside - 1
    ranks_across = trip.ranks - trip.inside
    inside = sent * ranks_inside / links.inside
    across = sent * ranks_across / links.network
    return max(inside, across)


def hop_latency(trip: DispatchTrip, links: LinkSpeeds) -> float:
    """Seconds of one collective over all ranks, without bytes."""
    return links.inside_latency if trip.on_one_node else links.network_latency


def all_gather_seconds(trip: DispatchTrip, links: LinkSpeeds) -> float:
    sending = even_spread_seconds(trip.ranks, trip, links)
    return hop_latency(trip, links) + sending


def all_to_all_seconds(trip: DispatchTrip, links: LinkSpeeds) -> float:
    reached = links
    if not links.measured:
        inside = links.inside * ALL_TO_ALL_OF_NVLINK
        network = links.network * ALL_TO_ALL_OF_NETWORK
        reached = replace(links, inside=inside, network=network)
    sending = even_spread_seconds(trip.k, trip, reached)
    return hop_latency(trip, links) + sending


def dedup_seconds(trip: DispatchTrip, links: LinkSpeeds) -> float:
    latency = hop_latency(trip, links)
    if trip.on_one_node and not links.measured:
        latency = LATENCY_PER_DOUBLING * log2(trip.ranks)
    copies = expected_distinct(trip.k, trip.ranks)
    sending = even_spread_seconds(copies, trip, links)
    return latency + sending


def hierarchical_seconds(trip: DispatchTrip, links: LinkSpeeds) -> float:
    """Seconds of the hierarchical dispatcher: a hop between nodes and one inside. Over known links, arrivals are
    forwarded inside the node while others arrive."""
    nodes_reached = expected_nodes_reached(trip)
    ranks_reached = expected_distinct(trip.k, trip.ranks)
    other_nodes = trip.nodes - 1
    other_ranks = trip.inside - 1
    sent_across = trip.bytes * nodes_reached * other_nodes / trip.nodes
    across = sent_across / links.network
    sent_within = trip.bytes * ranks_reached * other_ranks / trip.inside
    within = sent_within / links.inside
    sending = across + within if links.measured else max(across, within)
    return links.network_latency + links.inside_latency + sending


says = DISPATCHER_NAMES.says
# In the order in which auto prefers equals.
DISPATCHER_ENTRIES = {
    "dedup": DispatcherEntry(says("dedup"), seconds=dedup_seconds),
    "all_gather": DispatcherEntry(says("all_gather"), seconds=all_gather_seconds, joins_etp=True),
    "all_to_all": DispatcherEntry(says("all_to_all"), seconds=all_to_all_seconds),
    "hierarchical": DispatcherEntry(
        says("hierarchical"), "ranks on several nodes", hierarchical_seconds, several_nodes=True
    ),
    "deepep": DispatcherEntry(says("deepep"), "the package deep_ep, CUDA devices, bf16"),
    # the bytes of dedup; between GPUs its time is a forecast
    "symmetric": DispatcherEntry(
        says("symmetric"), "ranks of ep x etp on one machine; Triton on GPUs", seconds=dedup_seconds, on_request=True
    ),
}


def dispatcher_entry(name: str) -> DispatcherEntry:
    """The entry of a legal name; one without a price where none was attached, here or by an extension."""
    if name in DISPATCHER_ENTRIES:
        return DISPATCHER_ENTRIES[name]
    extension = find_extension("dispatcher", name)
    price = None
    if extension is not None:
        price = extension.price
    return DispatcherEntry(says(name), seconds=price)


def all_entries() -> dict[str, DispatcherEntry]:
    """Entries of all legal names, built-in ones first."""
    entries = dict(DISPATCHER_ENTRIES)
    for name in DISPATCHER_NAMES:
        if name not in DISPATCHER_NAMES.builtin:
            entries[name] = dispatcher_entry(name)
    return entries


def attach_price(name: str, seconds: Seconds, needs: str = "", several_nodes: bool = False) -> None:
    """Attach a price to a name of config/open_names.py, so that auto can choose it."""
    line = says(name)
    DISPATCHER_ENTRIES[name] = DispatcherEntry(line, needs, seconds, several_nodes)


def dispatch_seconds(name: str, trip: DispatchTrip, links: LinkSpeeds) -> float:
    """Predicted seconds of one dispatch; a combine takes the same."""
    seconds = dispatcher_entry(name).seconds
    if seconds is None:
        raise KeyError(f"no price is attached to the dispatcher {name}")
    return seconds(trip, links)
