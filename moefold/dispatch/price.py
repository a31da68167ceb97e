"""The choice of a dispatcher for a configuration: the one that is set, or that of least predicted time. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from moefold.anatomy.step_specs import dispatched_width
from moefold.config.clone_rules import COUNTING_DISPATCHERS
from moefold.config.precision_recipes import SCALE_BLOCK
from moefold.config.run import Config
from moefold.dispatch.catalog import DispatchTrip, LinkSpeeds, all_entries
from moefold.dispatch.room_sizes import room_in_words, tokens_per_exchange

INVARIANT_DISPATCHER = "all_to_all"


DECISIONS_IN_WORDS = {"now": "of this microbatch", "previous": "of the layer's microbatch before"}


def clones_in_words(config: Config) -> str:
    """The clones of hot experts that a run makes, in words; nothing if it makes none."""
    parallel = config.parallel
    counts = DECISIONS_IN_WORDS[parallel.clone_decision]
    slots = parallel.clone_slots
    if not slots:
        return ""
    return f"up to {slots} on each of {parallel.ep} ep ranks, by the counts {counts}"


def dispatch_trip(config: Config, ranks_on_a_node: int, bytes_each: int) -> DispatchTrip:
    """The load of one dispatch over the expert-parallel ranks."""
    parallel = config.parallel
    moe = config.model.moe
    groups_inside = ranks_on_a_node // parallel.etp
    inside = max(1, min(parallel.ep, groups_inside))
    return DispatchTrip(
        tokens_per_exchange(config),
        row_bytes_one_way(config, bytes_each),
        moe.top_k,
        parallel.ep,
        inside if parallel.ep % inside == 0 else parallel.ep,
        moe.router.groups,
        moe.router.groups_chosen,
    )


def row_bytes_one_way(config: Config, bytes_each: int) -> float:
    """Bytes of a row, the mean of its four ways: dispatch and combine, forward and backward. Tokens and gradients of
    combine's output may be sent in FP8, with scales of 4 bytes for 128 values."""
    width = dispatched_width(config.model)
    plain = width * bytes_each
    scales = -(-width // SCALE_BLOCK)
    saved = plain - (width + 4 * scales)
    precision = config.precision
    formats = precision.dispatch, precision.combine_gradient
    in_fp8 = sum(name != "plain" for name in formats)
    return plain - saved * in_fp8 / 4


def seconds_by_dispatcher(config: Config, ranks_on_a_node: int, bytes_each: int, links: LinkSpeeds) -> dict[str, float]:
    """Seconds one way by every priced dispatcher that this layout allows."""
    trip = dispatch_trip(config, ranks_on_a_node, bytes_each)
    parallel = config.parallel
    joint_ranks = parallel.ep * parallel.etp
    joint_inside = min(joint_ranks, ranks_on_a_node)
    joint_trip = replace(trip, ranks=joint_ranks, inside=joint_inside)
    one_node = trip.inside >= trip.ranks
    is_uneven = parallel.context_sizes == "dynamic"
    seconds: dict[str, float] = {}
    for name, entry in all_entries().items():
        is_left_out = entry.several_nodes and one_node
        is_left_out |= entry.on_request and parallel.dispatcher != name
        is_left_out |= is_uneven and name not in COUNTING_DISPATCHERS
        if entry.seconds is None or is_left_out:
            continue
        load = joint_trip if entry.joins_etp else trip
        seconds[name] = entry.seconds(load, links)
    return seconds


def cheapest_dispatcher(
    config: Config,
    ranks_on_a_node: int,
    bytes_each: int,
    links: LinkSpeeds | None = None,
) -> tuple[str, str]:
    """The dispatcher to use and the reason: the user's choice, else the least predicted time over these links."""
    parallel = config.parallel
    if parallel.ep * parallel.etp == 1:
        return "local", "all experts are on this rank"
    if parallel.dispatcher == "symmetric":
        return parallel.dispatcher, f"asked for; {room_in_words(config, bytes_each)}"
    if parallel.dispatcher != "auto":
        return parallel.dispatcher, "asked for"
    if config.kernels.invariant:
        return INVARIANT_DISPATCHER, "sums a token's results in one order on any number of ranks (kernels.invariant)"
    links = links or LinkSpeeds()
    seconds = seconds_by_dispatcher(config, ranks_on_a_node, bytes_each, links)
    order = sorted(seconds, key=seconds.__getitem__)
    figures = [f"{name} {seconds[name] * 1e3:.2f}" for name in order]
    listed = ", ".join(figures)
    tokens = tokens_per_exchange(config)
    reason = f"least predicted time, ms one way for {tokens} tokens: {listed}"
    if parallel.ep > 1:
        trip = dispatch_trip(config, ranks_on_a_node, bytes_each)
        reason += f"; {links.in_words(trip)}"
    return order[0], reason


def predicted_one_way(config: Config, ranks_on_a_node: int, bytes_each: int, links: LinkSpeeds) -> tuple[str, float]:
    """The dispatcher of a run and its seconds one way. A dispatcher without a price is priced as DeepEP: one copy of a
    token per rank inside a node, and one per other node."""
    seconds = seconds_by_dispatcher(config, ranks_on_a_node, bytes_each, links)
    name, _ = cheapest_dispatcher(config, ranks_on_a_node, bytes_each, links)
    if name not in seconds:
        name = "hierarchical" if "hierarchical" in seconds else "dedup"
    return name, seconds[name]
