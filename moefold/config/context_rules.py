"""Rules of dynamic context parallelism (`parallel.context_sizes dynamic`): what it needs, and what does not know of it
yet."""

from __future__ import annotations

from math import lcm

from moefold.config.clone_rules import COUNTING_DISPATCHERS
from moefold.config.context_sending import read_keys
from moefold.config.rule import ConfigOnRanks, RuleList

SENDING = "parallel.context_sending"
SIZES = "parallel.context_sizes"
DISPATCHERS = ("auto", *COUNTING_DISPATCHERS)  # auto chooses among these
FIXED_SIZES = "set parallel.context_sizes to fixed"

CONTEXT_RULES = RuleList()


def is_dynamic(c: ConfigOnRanks) -> bool:
    return c.parallel.context_sizes == "dynamic"


def can_swap_heads(c: ConfigOnRanks, ranks: int) -> bool:
    """Whether so many ranks can share the query heads of a tp rank: these are a multiple of its key/value heads, as
    often as they have to be copied."""
    attention = c.model.attention
    tp = c.parallel.tp
    heads = attention.heads // tp
    kv_heads = attention.kv_heads // tp
    at_least_one = max(1, kv_heads)
    together = lcm(at_least_one, ranks)
    return heads % together == 0


def largest_context_size(c: ConfigOnRanks) -> int:
    """The largest power of two that divides dp x cp; 1 where the ranks are too few for tp x pp, which another rule
    refuses."""
    ranks = c.world // (c.parallel.tp * c.parallel.pp)
    return max(1, ranks & -ranks)


@CONTEXT_RULES.rule(
    "dynamic context has samples to group",
    (SIZES, "data.packing"),
    why="windows of a row are all as long as a sequence",
    fix="set data.packing to best_fit",
)
def dynamic_context_has_samples(c: ConfigOnRanks) -> bool:
    return not is_dynamic(c) or c.data.packing != "windows"


@CONTEXT_RULES.rule(
    "dynamic context holds the longest sample",
    (SIZES, "parallel.cp", "train.micro_batch"),
    says="<parallel.cp> with <train.micro_batch>: groups of a power of two of the dp x cp ranks cannot hold a sequence",
    fix=FIXED_SIZES,
)
def dynamic_context_holds_the_longest(c: ConfigOnRanks) -> bool:
    held = largest_context_size(c) * c.train.micro_batch
    return not is_dynamic(c) or held >= c.parallel.cp


@CONTEXT_RULES.rule(
    "dynamic context has heads to swap",
    (SIZES, "parallel.context", "parallel.tp", "model.attention.heads", "model.attention.kv_heads"),
    why="heads are swapped over all sizes of groups, up to dp x cp ranks",
    fix=FIXED_SIZES,
)
def dynamic_context_has_heads(c: ConfigOnRanks) -> bool:
    if not is_dynamic(c) or c.parallel.context != "all_to_all":
        return True
    ranks = largest_context_size(c)  # smaller groups have a power of two of ranks too, and divide it
    return can_swap_heads(c, ranks)


@CONTEXT_RULES.rule(
    "what groups send is of dynamic context",
    (SENDING, SIZES),
    why="with fixed sizes there are no groups to plan",
    fix='set parallel.context_sending to ""',
)
def what_groups_send_is_of_dynamic_context(c: ConfigOnRanks) -> bool:
    return is_dynamic(c) or not c.parallel.context_sending


@CONTEXT_RULES.rule(
    "what groups send can be read",
    (SENDING,),
    says="<parallel.context_sending>: expected numbers of keys, at least 0, for groups of 2, 4, ... ranks, or one for "
    "all",
    fix='set parallel.context_sending to ""',
)
def what_groups_send_can_be_read(c: ConfigOnRanks) -> bool:
    sending = c.parallel.context_sending
    larger = largest_context_size(c).bit_length() - 1
    is_complete = not is_dynamic(c) or len(sending) in (0, 1, larger)
    return is_complete and all(read_keys(text) is not None for text in sending)


@CONTEXT_RULES.rule(
    "dynamic context sends rows that are counted",
    (SIZES, "parallel.dispatcher", "parallel.ep", "parallel.etp"),
    why=f"ranks have different numbers of tokens, which {', '.join(COUNTING_DISPATCHERS)} count",
    fix=FIXED_SIZES,
)
def dynamic_context_counts_rows(c: ConfigOnRanks) -> bool:
    p = c.parallel
    counts = p.ep * p.etp == 1 or p.dispatcher in DISPATCHERS
    return not is_dynamic(c) or counts


@CONTEXT_RULES.rule(
    "dynamic context has no clones",
    (SIZES, "parallel.clone_slots"),
    why="clones are planned for ranks with as many tokens each",
    fix=FIXED_SIZES,
)
def dynamic_context_has_no_clones(c: ConfigOnRanks) -> bool:
    return not (is_dynamic(c) and c.parallel.clone_slots)


@CONTEXT_RULES.rule(
    "a step of dynamic context is launched anew",
    (SIZES, "memory.graphs"),
    why="steps have different shapes",
    fix=FIXED_SIZES,
)
def dynamic_context_is_in_no_graph(c: ConfigOnRanks) -> bool:
    return not is_dynamic(c) or c.memory.graphs == "none"


@CONTEXT_RULES.rule(
    "dynamic context balances samples or batches",
    (SIZES, "model.moe.balance.aux_over"),
    why="a balance loss over microbatches would depend on how samples are grouped",
    fix=FIXED_SIZES,
)
def dynamic_context_balances_samples(c: ConfigOnRanks) -> bool:
    return not is_dynamic(c) or c.model.moe.balance.aux_over != "microbatch"


@CONTEXT_RULES.rule(
    "routing is recorded by sequence",
    (SIZES, "train.record_routing", "train.replay_routing"),
    why="records are by sequence and place, and samples are grouped anew",
    fix=FIXED_SIZES,
)
def dynamic_context_records_no_routing(c: ConfigOnRanks) -> bool:
    records = c.train.record_routing or c.train.replay_routing
    return not (is_dynamic(c) and records)
