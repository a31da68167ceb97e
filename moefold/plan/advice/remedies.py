"""Remedies for the walls of a plan, of the Megatron-Core MoE report: memory (Table 13), communication (Table 14), host
(Table 15) and computation (Table 16). Grouped GEMMs, fused routing and a paused garbage collector are always on here,
so that no sentence names them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

from moefold.anatomy.stage_contents import rank_of_each_stage
from moefold.plan.advice.ratios import graph_count, has_experts
from moefold.plan.advice.sentences import NEARLY_FULL, NOTICEABLE, Advice, propose, propose_faster
from moefold.plan.advice.situation import WORTH_SAYING, Change, Situation
from moefold.plan.allowed_changes import rules_broken_by
from moefold.plan.layer.moefold_layers import HOPPER_CAPABILITY
from moefold.plan.machine.efficiency_fit import EXPERT_TILE_ROWS

SLOW_KERNELS = 0.3  # share of the step that kernels below the peak may take
SMALL_SAVING = 0.01  # share of the memory
SMALL_COST = 0.005  # share of the speed
FEW_TILES = 2  # of rows that an expert gets
UNEVEN_STAGES = 1.1  # slowest rank of a pipeline over the mean
LOW_PRECISIONS = ("mxfp8", "fp8-blockwise", "fp8")  # in order of preference
GRAPH_KINDS = ("whole", "static")  # in order of preference
FIRST_RECIPE = "fp8_block"  # of the trainer's own, which have kernels for Hopper


# Table 13: memory.


def memory_remedies(plan: Situation) -> Iterator[Advice]:
    used = plan.gib / plan.gpu.memory
    if used < NEARLY_FULL and not plan.choices.recompute:
        return
    yield from needless_recompute(plan)
    if used < NEARLY_FULL:
        return
    for change in memory_changes(plan):
        other = plan.changed(change)
        if other is None:
            continue
        saved = plan.gib - other.gib
        if saved < SMALL_SAVING * plan.gpu.memory:
            continue
        result = f"{saved:.1f} GiB less{describe_cost(plan, other)}"
        yield Advice("memory", f"{used:.0%} of the memory is needed; {propose(change, result)}", "table 13")


def describe_cost(plan: Situation, other: Situation) -> str:
    """What less memory costs; the speed is only of interest where the plan then fits."""
    if not other.fits:
        return ""
    slower = -plan.gain(other)
    cost = f", {slower:.0%} slower" if slower >= SMALL_COST else ""
    return cost if plan.fits else f"{cost}, fits"


def memory_changes(plan: Situation) -> Iterator[Change]:
    optim, choices = plan.config.optim, plan.choices
    if optim.moments == "fp32":
        yield {"optim.moments": "bf16"}
    if optim.main == "fp32":
        yield {"optim.main": "split"}
    if plan.config.model.moe.gate == "output":
        yield {"model.moe.gate": "activation"}
    regions = ("norm", "activation")
    if plan.config.model.attention.kind == "mla":
        regions = (*regions, "up")
    if not choices.recomputed.issuperset(regions):
        recomputed = dict.fromkeys((*choices.recompute, *regions))
        yield {"recompute": tuple(recomputed)}
    if not choices.offload:
        yield {"offload": ("experts",)}
    if not plan.setting.states_on_host:
        yield {"optim.states": "host"}


def needless_recompute(plan: Situation) -> Iterator[Advice]:
    if not plan.choices.recompute:
        return
    change: Change = {"recompute": ()}
    other = plan.changed(change)
    if other and plan.is_better(other):
        regions = ",".join(plan.choices.recompute)
        text = f"without recompute of {regions} the plan still fits: {plan.describe_gain(other)}"
        yield Advice("memory", text, "table 13")


# Table 14: communication.


def communication_remedies(plan: Situation) -> Iterator[Advice]:
    yield from hidden_dispatch(plan)
    yield from chunked_rows(plan)
    yield from lighter_exchange(plan)
    yield from exposed_collectives(plan)
    yield from even_stages(plan)


def hidden_dispatch(plan: Situation) -> Iterator[Advice]:
    exposed = plan.share(plan.time.pipeline_time.exposed)
    if exposed < NOTICEABLE:
        return
    text = f"{exposed:.0%} of the step waits for tokens on their way to experts and back"
    changes: list[Change] = [{"parallel.dispatcher": "auto"}]
    if not plan.config.pipeline.pair:
        changes.append({"pipeline.pair": True})
    for change in changes:
        other = plan.changed(change)
        if other and plan.is_better(other):
            yield Advice("communication", f"{text}; {propose_faster(plan, change, other)}", "table 14")


def chunked_rows(plan: Situation) -> Iterator[Advice]:
    """Overlap inside a layer, or why it does not pay."""
    exposed = plan.share(plan.time.pipeline_time.exposed)
    is_paired = plan.config.pipeline.pair
    if exposed < NOTICEABLE or is_paired or plan.choices.stack != "moefold":
        return
    chunks = plan.config.parallel.row_chunks
    twice: Change = {"parallel.row_chunks": 2 * chunks}
    four_times: Change = {"parallel.row_chunks": 4 * chunks}
    best = plan.best_of((twice, four_times))
    if best:
        change, other = best
        text = f"{exposed:.0%} of the step waits for tokens; {propose_faster(plan, change, other)}"
        yield Advice("communication", text, "this trainer")
        return
    other = plan.changed(twice)
    if other:
        reason = why_chunks_do_not_pay(plan, other)
        text = f"parallel.row_chunks {2 * chunks} would not pay: {reason}"
        yield Advice("communication", text, "this trainer")


def why_chunks_do_not_pay(plan: Situation, other: Situation) -> str:
    if not other.fits:
        return "the plan would not fit"
    time = plan.time
    changed = other.time
    hidden = time.pipeline_time.exposed - changed.pipeline_time.exposed
    added = 0.0
    for wall in ("compute", "host"):
        before = time.walls[wall]
        added += changed.walls[wall] - before
    more = plan.share(added)
    slower = f"kernels of fewer rows and their launches take {more:.1%} of the step more"
    if hidden <= 0:
        return f"experts compute too little to hide the exchanges of more and smaller messages, and {slower}"
    saved = plan.share(hidden)
    return f"exchanges would be hidden for {saved:.1%} of the step, but {slower}"


def lighter_exchange(plan: Situation) -> Iterator[Advice]:
    part = plan.share(plan.time.exchange)
    if part < WORTH_SAYING or plan.config.optim.gradient_reduce != "fp32":
        return
    change: Change = {"optim.gradient_reduce": "bf16"}
    other = plan.changed(change)
    if other and plan.is_better(other):
        text = f"{part:.0%} of the step is exposed exchange of gradients and weights"
        yield Advice("communication", f"{text}; {propose_faster(plan, change, other)}", "table 14")


def exposed_collectives(plan: Situation) -> Iterator[Advice]:
    time = plan.time
    joined = time.walls["communication"] - time.pipeline_time.exposed
    joined -= time.exchange
    part = plan.share(joined)
    p = plan.config.parallel
    if part < NOTICEABLE or p.tp == 1:
        return
    text = f"{part:.0%} of the step is collectives of tp {p.tp}"
    if p.cp > 1:
        text += f" and cp {p.cp}"
    advice = f"{text}; overlapped with GEMMs (not in the trainer yet) they would cost at most that much less"
    yield Advice("communication", advice, "table 14")


def even_stages(plan: Situation) -> Iterator[Advice]:
    if plan.config.parallel.pp == 1:
        return
    by_rank = [0.0] * plan.config.parallel.pp
    costs = plan.time.costs
    for stage, rank in enumerate(rank_of_each_stage(plan.config)):
        for kind in costs.compute:
            compute = costs.compute[kind][stage]
            by_rank[rank] += compute + costs.comm[kind][stage]
    slowest = max(by_rank) / mean(by_rank)
    if slowest < UNEVEN_STAGES:
        return
    rank = by_rank.index(max(by_rank))
    text = f"pipeline rank {rank} takes {slowest:.2f} times the mean rank; move a layer from it with pipeline.layout"
    yield Advice("bubble", text, "table 14")


# Tables 15 and 16: host and computation.


def larger_microbatches(plan: Situation) -> Iterator[Advice]:
    host = plan.wall("host")
    rows = expert_rows_each(plan)
    few = 0 < rows < FEW_TILES * EXPERT_TILE_ROWS
    if host < NOTICEABLE and not few:
        return
    size = plan.config.train.micro_batch
    change: Change = {"train.micro_batch": 2 * size}
    other = plan.changed(change)
    if not other or not plan.is_better(other):
        return
    if host >= NOTICEABLE:
        text = f"{host:.0%} of the step waits for launches"
        yield Advice("host", f"{text}; {propose_faster(plan, change, other)}", "table 15")
    if few:
        text = f"an expert gets {rows:.0f} rows, in tiles of {EXPERT_TILE_ROWS}"
        yield Advice("compute", f"{text}; {propose_faster(plan, change, other)}", "table 16")


def expert_rows_each(plan: Situation) -> float:
    """Rows of an expert in a microbatch under an even load; 0 without experts."""
    s = plan.setting
    if not has_experts(s):
        return 0.0
    shapes = s.layer_shapes(s.model.layers - 1)
    return shapes.R / shapes.e


def captured_graphs(plan: Situation) -> Iterator[Advice]:
    host = plan.wall("host")
    if host < NOTICEABLE or plan.choices.graphs != "none":
        return
    allowed = [kind for kind in GRAPH_KINDS if can_capture(plan, kind)]
    if not allowed:
        return
    kind = allowed[0]
    change: Change = {"graphs": kind}
    other = plan.changed(change)
    if other and plan.is_better(other):
        gain = plan.describe_gain(other)
        count = describe_graph_count(plan, kind)
        proposal = propose(change, gain + count)
        text = f"{host:.0%} of the step waits for launches"
        yield Advice("host", f"{text}; {proposal}", "table 15")


def can_capture(plan: Situation, kind: str) -> bool:
    """Whether the trainer captures this layout, with its recompute and offload, in graphs of this kind. Other trainers
    have static graphs of any layout."""
    if plan.choices.stack != "moefold":
        return kind == "static"
    captured = replace(plan.choices, graphs=kind)  # pyright: ignore[reportArgumentType]
    return not rules_broken_by(plan.config, captured, plan.setting.world)


def describe_graph_count(plan: Situation, kind: str) -> str:
    if kind == "whole":
        return ", with one graph"
    if plan.choices.stack == "moefold":
        return ""  # as many as its schedule has microbatches in flight
    graphs = graph_count(plan.setting)
    return f", with {graphs:,} graphs"


def lower_precision(plan: Situation) -> Iterator[Advice]:
    """Table 16, and table 13 where memory is short."""
    products = plan.wall("arithmetic") + plan.wall("compute")
    short = plan.gib > NEARLY_FULL * plan.gpu.memory
    known = [name for name in LOW_PRECISIONS if name in plan.gpu.precisions]
    slow = plan.wall("compute") >= SLOW_KERNELS
    if plan.setting.product_precision != "bf16" or not known:
        return
    if not slow and not short:
        return
    change: Change = {"precision": known[0]}
    if plan.choices.stack == "moefold" and plan.gpu.capability == HOPPER_CAPABILITY:
        change = {"precision.recipe": FIRST_RECIPE}
    other = plan.changed(change)
    if other is None or plan.gain(other) < NOTICEABLE:
        return
    text = f"{products:.0%} of the step is arithmetic and its kernels"
    yield Advice("compute", f"{text}; {propose_faster(plan, change, other)}", "table 16")
