"""Five guidelines for a layout, of the Megatron-Core MoE report, section 9.1.2. A sentence appears where its group or
share is in the plan at hand; a change is proposed if the changed plan, planned anew, fits and is faster."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from moefold.plan.advice.ratios import crosses_domain, expert_ranks
from moefold.plan.advice.sentences import NOTICEABLE, Advice, propose, propose_faster
from moefold.plan.advice.situation import Change, Situation

LONG_SEQUENCE = 8192  # tokens, by guideline 5
SHORT_SEQUENCE = 4096
CONTEXT_RANKS = (2, 4, 8)
SMALLER_BUBBLE = 0.01  # of the step


def less_model_parallelism(plan: Situation) -> Iterator[Advice]:
    """Guideline 1: the smallest degrees that fit; replicas do the rest."""
    source = "guideline 1"
    p = plan.config.parallel
    replicas = plan.setting.degrees["dp"]
    if plan.choices.sharding == "none" and replicas > 1:
        sharded = plan.changed({"sharding": "zero"})
        if sharded:
            saved = plan.gib - sharded.gib
            yield Advice("layout", f"sharding zero: {saved:.1f} GiB of optimizer state less on each rank", source)
    for axis in ("tp", "cp", "pp", "ep"):
        degree = getattr(p, axis)
        if degree % 2:
            continue
        change: Change = {f"parallel.{axis}": degree // 2}
        other = plan.changed(change)
        if other and plan.is_better(other):
            text = f"{axis} {degree} is more than memory asks for: {propose_faster(plan, change, other)}"
            yield Advice("layout", text, source)


def groups_inside_a_domain(plan: Situation) -> Iterator[Advice]:
    """Guideline 2: experts and tensor-parallel ranks inside a domain, pipelines between domains."""
    s, domain = plan.setting, plan.gpu.domain
    p = s.parallel
    ranks = expert_ranks(s)
    if not crosses_domain(s, plan.gpu):
        return
    waiting = plan.share(plan.time.pipeline_time.exposed)
    domains = ceil(ranks / domain)
    text = f"a layer's experts lie in {domains} NVLink domains of {domain}; {waiting:.0%} of the step waits for tokens"
    ep = max(1, domain // p.etp)
    fewer: Change = {"parallel.ep": ep}
    pp = p.pp * (p.ep // ep)
    deeper: Change = {"parallel.ep": ep, "parallel.pp": pp}
    best = plan.best_of((fewer, deeper))
    if best:
        change, other = best
        text = f"{text}; {propose_faster(plan, change, other)}"
    else:
        text = f"{text}; ep {ep}, with or without a deeper pipeline, is not faster or does not fit"
    yield Advice("communication", text, "guideline 2")


def more_stages_per_rank(plan: Situation) -> Iterator[Advice]:
    """Guideline 3: virtual stages where a pipeline waits."""
    p = plan.config.pipeline
    bubble = plan.wall("bubble")
    if plan.config.parallel.pp == 1 or bubble < NOTICEABLE:
        return
    text = f"{bubble:.0%} of the step is pipeline bubble"
    twice_as_many: Change = {"pipeline.vpp": 2 * p.vpp}
    four_times: Change = {"pipeline.vpp": 4 * p.vpp}
    best = plan.best_of((twice_as_many, four_times))
    batch = plan.config.train.global_batch
    twice = plan.changed({"train.global_batch": 2 * batch})
    if best:
        change, other = best
        result = f"{other.wall('bubble'):.0%} of the step, {plan.describe_gain(other)}"
        yield Advice("bubble", f"{text}; {propose(change, result)}", "guideline 3")
        return
    rest = twice.wall("bubble") if twice else bubble
    if bubble - rest >= SMALLER_BUBBLE:
        yield Advice("bubble", f"{text}; twice the sequences a step would leave {rest:.0%}", "guideline 3")


def whole_experts(plan: Situation) -> Iterator[Advice]:
    """Guideline 4: whole experts on more ranks instead of pieces of experts."""
    p = plan.config.parallel
    if p.etp == 1:
        return
    ep = p.ep * p.etp
    change: Change = {"parallel.ep": ep, "parallel.etp": 1}
    other = plan.changed(change)
    if other and plan.is_better(other):
        text = f"every expert is cut in {p.etp}; {propose_faster(plan, change, other)}"
        yield Advice("layout", text, "guideline 4")


def context_parallelism(plan: Situation) -> Iterator[Advice]:
    """Guideline 5: context parallelism for long sequences only."""
    cp = plan.config.parallel.cp
    length = plan.config.data.seq_len
    if cp > 1 and length < SHORT_SEQUENCE:
        yield from less_context(plan)
    if cp == 1 and length >= LONG_SEQUENCE:
        yield from more_context(plan)


def less_context(plan: Situation) -> Iterator[Advice]:
    cp = plan.config.parallel.cp
    length = plan.config.data.seq_len
    change: Change = {"parallel.cp": 1}
    other = plan.changed(change)
    if other and other.fits:
        text = f"sequences of {length} tokens are short for cp {cp}; {propose_faster(plan, change, other)}"
        yield Advice("layout", text, "guideline 5")


def more_context(plan: Situation) -> Iterator[Advice]:
    """The smallest cp that makes the plan fit, or makes it faster."""
    rank = plan.fullest
    held = rank.activations + rank.working
    part = held / (rank.total + rank.outside)
    for cp in CONTEXT_RANKS:
        change: Change = {"parallel.cp": cp, "parallel.context": "all_gather"}
        other = plan.changed(change)
        if other is None or not other.fits:
            continue
        if not plan.fits:
            result = propose(change, f"{other.gib:.1f} GiB, fits")
        elif plan.is_better(other):
            result = propose_faster(plan, change, other)
        else:
            continue
        text = f"activations of {plan.config.data.seq_len} tokens are {part:.0%} of the memory; {result}"
        yield Advice("layout", text, "guideline 5")
        return
