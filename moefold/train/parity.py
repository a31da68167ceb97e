"""Parity of a layout with one rank: both run for a few steps, everything is compared, the first difference is named.

A trace has, for every step and in this order: the loss, the tokens of each expert, every gradient, the gradient norm,
every updated weight. A rank's trace has its parts of tensors, each with its position in the whole tensor; they are
compared with the same positions of the one-rank trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, lcm
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moefold.checkpoint.format.boxes import box_corner, box_sizes, box_slices, element_count
from moefold.checkpoint.live.logical_tensors import TensorPart, boxes_in_whole, part_of_parameter, part_of_state
from moefold.config.memory_regions import (
    EXPERT_WEIGHTS,
    entries_of_expert_weights,
    entries_of_regions,
    outermost_regions,
    without_presets,
)
from moefold.config.rules import check_config
from moefold.config.run import (
    AttentionConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ShardConfig,
    TrainConfig,
)
from moefold.data.corpus import Corpus
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters
from moefold.model.moe.balance import ExpertLoad, LayerLoads
from moefold.plan.time.run_context import with_expected_context
from moefold.train.assemble import Run, assemble_run
from moefold.train.step import take_next_step

ROUTINGS = ("learned", "skewed", "one expert", "empty experts")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}


@dataclass(frozen=True)
class TraceEntry:
    """One value or tensor part of one step. `starts` is its corner in the whole tensor."""

    what: str
    starts: tuple[int, ...]
    values: Tensor


RankTrace = list[TraceEntry]
Trace = Sequence[TraceEntry]


@dataclass(frozen=True)
class ParityMismatch:
    """The first difference: of which entry, by how much (relative), and on which ranks."""

    what: str
    error: float
    ranks: list[int]

    def __str__(self) -> str:
        noun = "rank" if len(self.ranks) <= 1 else "ranks"
        return f"{self.what} differs by {self.error:.2e} (relative) on {noun} {self.ranks}"


def shrink_config(config: Config, world: int) -> Config:
    """The same mechanisms and degrees at sizes that a CPU handles in a second; refused if the degrees do not fit that
    many ranks. Products are plain: rounding to FP8 would turn a difference of the last bit into a large one."""
    small = replace(
        config,
        model=shrink_model(config),
        data=shrink_data(config),
        train=shrink_training(config, world),
        optim=comparable_optimizer(config.optim),
        pipeline=replace(config.pipeline, layout=""),  # the user's layout is for other numbers of layers
        precision=PrecisionConfig(),
        memory=regions_in_all_layers(config.memory),
    )
    return check_config(small, world)


def comparable_config(config: Config, ranks: int) -> Config:
    """What is run to compare a layout with one rank: the mechanisms of its run, at small sizes. Adapters have weights
    as they are beside them: blocks of 64 and more values do not fit small matrices."""
    plain_base = replace(config.lora, base="plain")
    plain = replace(config, lora=plain_base)
    shrink_config(plain, ranks)  # degrees that do not fit the ranks are refused before a mechanism is chosen for them
    chosen = with_expected_context(plain, ranks, ranks)
    return shrink_config(chosen, ranks)


def regions_in_all_layers(memory: MemoryConfig) -> MemoryConfig:
    """The same regions in all layers: those that are named are of another number of layers. Small tensors are
    offloaded too."""
    recompute = region_names(without_presets(memory.recompute))
    offload = region_names(entries_of_regions(memory.offload))
    if entries_of_expert_weights(memory.offload):
        offload = (EXPERT_WEIGHTS, *offload)
    return replace(memory, recompute=recompute, offload=offload, offload_least=1)


def region_names(entries: Sequence[str]) -> tuple[str, ...]:
    """The regions of entries, without their layers."""
    parts = [entry.partition("@") for entry in entries]
    return outermost_regions(name for name, _, _ in parts)


def shrink_model(config: Config) -> ModelConfig:
    model = config.model
    parallel = config.parallel
    virtual_stages = parallel.pp * config.pipeline.vpp
    period = 2 * model.moe.every
    return replace(
        model,
        layers=max(period, virtual_stages),
        hidden=32,
        vocab=lcm(256, parallel.tp),
        dense_ffn=16 * parallel.tp,
        mtp=min(model.mtp, 2),
        attention=shrink_attention(model.attention, parallel),
        moe=shrink_moe(model.moe, parallel),
    )


def shrink_attention(a: AttentionConfig, parallel: ParallelConfig) -> AttentionConfig:
    head_ranks = parallel.tp  # over which heads are split
    if parallel.context in ("all_to_all", "hierarchical"):
        head_ranks *= parallel.cp
    kv_heads = lcm(head_ranks, min(a.kv_heads, 2))
    group = a.heads // a.kv_heads
    group = min(2, max(1, group))
    return replace(
        a,
        head_dim=8,
        rope_dim=4 if a.rope_dim else 0,
        q_rank=12 if a.q_rank else 0,
        kv_rank=16,
        value_dim=6 if a.value_dim else 0,
        window=min(a.window, 3),
        kv_heads=kv_heads,
        heads=kv_heads * group,
    )


def shrink_moe(moe: MoeConfig, parallel: ParallelConfig) -> MoeConfig:
    devices = min(moe.balance.devices, 4)
    few_experts = min(moe.experts, 8)
    experts = lcm(parallel.ep, few_experts, devices)
    groups = min(moe.router.groups, 4)
    most_chosen = max(1, groups // 2)
    eligible = experts * most_chosen // groups
    groups_chosen = min(moe.router.groups_chosen, most_chosen)
    router = replace(moe.router, groups=groups, groups_chosen=groups_chosen)
    shared_ffn = 8 * parallel.tp
    return replace(
        moe,
        experts=experts,
        latent=16 if moe.latent else 0,
        top_k=min(moe.top_k, eligible, 4),
        ffn=8 * parallel.etp,
        shared_ffn=shared_ffn if moe.shared_ffn else 0,
        dense_layers=min(moe.dense_layers, 1),
        router=router,
        balance=replace(moe.balance, devices=devices),
        capacity=replace(moe.capacity, over="full_sequence", pad=False),
    )


def shrink_data(config: Config) -> DataConfig:
    sequence_ranks = config.parallel.tp * config.parallel.cp
    seq_len = lcm(2 * sequence_ranks, 8)
    stdlib = replace(config.data, source="stdlib", files=(), tokenizer="byte")
    return replace(stdlib, seq_len=seq_len)


def shrink_training(config: Config, world: int) -> TrainConfig:
    parallel = config.parallel
    model_ranks = parallel.tp * parallel.cp * parallel.pp
    dp = max(1, world // model_ranks)
    microbatches = 2 if parallel.pp == 1 else 2 * parallel.pp + 1
    on_cpu = replace(config.train, device="cpu", steps=8)
    return replace(on_cpu, global_batch=dp * microbatches, micro_batch=1)


def comparable_optimizer(optim: OptimConfig) -> OptimConfig:
    """All in fp32. Without clipping, gradients are traced as they are. With a small eps, Adam would turn the rounding
    of gradients near zero into steps of full size."""
    moments = replace(optim, moments="fp32", second_moment="as_first")
    nearest = replace(moments, rounding="nearest", main_rounding="stochastic")  # which has nothing to round
    fp32 = replace(nearest, main="fp32", gradients="fp32", gradient_reduce="fp32")
    return replace(fp32, warmup=0, lr=1e-2, eps=1e-3, max_norm=1e9)


def single_rank_config(config: Config) -> Config:
    """The same run on a single rank, in larger microbatches where nothing is counted per microbatch and the batch has
    an even number of sequences."""
    moe = config.model.moe
    has_capacity = moe.capacity.factor != 0
    fills_bins = config.data.batch_of == "samples"
    counts_microbatches = has_capacity or fills_bins or moe.balance.aux_over == "microbatch"
    is_odd = config.train.global_batch % 2 == 1
    micro_batch = 1 if counts_microbatches or is_odd else 2
    return replace(
        config,
        train=replace(config.train, micro_batch=micro_batch),
        parallel=ParallelConfig(),
        pipeline=PipelineConfig(),
        shard=ShardConfig(),
    )


def played_node_size(config: Config, ranks: int) -> int:
    """How many of the ranks count as one node: all, or with sums in two levels half of those among which a pipeline
    stage is shared out, so that both levels are at work."""
    if config.shard.sync == "flat":
        return ranks
    nodes = 2 * config.parallel.pp * config.shard.replicas
    return max(1, ranks // nodes)


def trace_run(config: Config, world: World, steps: int, routing: str = "learned") -> RankTrace:
    """The trace of this rank over the first steps of a run on random tokens."""
    corpus = random_corpus(config)
    run = assemble_run(config, world, Path("."), corpus)
    skew_routing_biases(run, routing)
    trace: RankTrace = []
    for _ in range(steps):
        trace += trace_one_step(run)
    return trace


def random_corpus(config: Config) -> Corpus:
    """Random tokens in documents of three on average, shorter than the shortest sequence."""
    random = np.random.default_rng(5)
    count = 200 * config.data.seq_len
    drawn = random.integers(0, 256, size=count)
    tokens = drawn.astype(np.uint8)
    begins = random.random(count) < 1 / 3
    starts = np.flatnonzero(begins)
    starts[0] = 0
    return Corpus(tokens, tokens, starts, starts)


def skew_routing_biases(run: Run, routing: str) -> None:
    """Set the selection biases so that routing is as uneven as `routing` says."""
    for module in run.model.modules():
        if not isinstance(module, ExpertLoad):
            continue
        experts = len(module.bias_E)
        expert_E = torch.arange(experts)
        is_odd_E = expert_E % 2
        biases = {
            "learned": torch.zeros(experts),
            "skewed": -0.1 * expert_E,
            "one expert": -100.0 * expert_E,
            "empty experts": -100.0 * is_odd_E,
        }
        module.bias_E.copy_(biases[routing])


def trace_one_step(run: Run) -> RankTrace:
    report = take_next_step(run)
    run.parameters.await_all_buckets()
    when = f"step {run.step}: "
    return [
        scalar_entry(f"{when}loss", report.loss),
        *expert_token_counts(report.loads, when),
        *local_gradients(run, when),
        scalar_entry(f"{when}gradient norm", report.grad_norm),
        *local_weights(run, when),
    ]


def scalar_entry(what: str, value: float) -> TraceEntry:
    scalar = torch.tensor(value, dtype=torch.float64)
    return TraceEntry(what, (), scalar)


def local_weights(run: Run, when: str) -> RankTrace:
    """This rank's part of every weight; where the model has no values, what the optimizer has of it here."""
    parts: dict[str, TensorPart] = {}
    for parameter in declared_parameters(run.model):
        parts[parameter.name] = part_of_parameter(parameter.tensor, parameter)
    for parameter, first, values in run.optimizer.unheld_weights():
        parts[parameter.name] = part_of_state(parameter, first, values)
    entries: RankTrace = []
    for name, part in parts.items():
        for held in part.held:
            corner = tuple(box_corner(held.box))
            values = held.read().detach()
            entry = TraceEntry(f"{when}weight {name}", corner, values.clone())
            entries.append(entry)
    return entries


def expert_token_counts(loads: LayerLoads, when: str) -> RankTrace:
    """The tokens of each expert of this rank's layers."""
    entries: RankTrace = []
    counts_by_layer = zip(loads.layers, loads.counts_LE, strict=True)
    for layer, counts_E in counts_by_layer:
        what = f"{when}tokens of each expert of layer {layer}"
        counts = counts_E.double()
        entry = TraceEntry(what, (0,), counts)
        entries.append(entry)
    return entries


def local_gradients(run: Run, when: str) -> RankTrace:
    """This rank's share of every gradient, as boxes of the whole parameter; nothing where updates have freed them."""
    entries: RankTrace = []
    if run.config.optim.when == "backward":
        return entries
    buckets = run.gradients.buckets
    shares = run.gradients.gradient_shares()
    for bucket, share in zip(buckets, shares, strict=True):
        for parameter, first, last, offset in bucket.pieces():
            what = f"{when}gradient {parameter.name}"
            for begin, box in boxes_in_whole(first, last, parameter):
                start = offset + begin - first
                end = start + element_count(box)
                flat = share[start:end]
                values = flat.view(box_sizes(box))
                corner = tuple(box_corner(box))
                entry = TraceEntry(what, corner, values.clone())
                entries.append(entry)
    return entries


def relative_error(entry: TraceEntry, reference: Tensor) -> float:
    """The error of a part, relative to the norm of the whole tensor, so that a part of tiny numbers is not wrong for
    its rounding. Infinite if it is not a number."""
    ranges = zip(entry.starts, entry.values.shape, strict=True)
    box = tuple(ranges)
    expected = reference[box_slices(box)]
    difference = entry.values.double() - expected.double()
    scale = reference.double().norm() + 1e-30
    relative = difference.norm() / scale
    error = relative.item()
    return inf if isnan(error) else error


def first_mismatch(single_rank: Trace, ranks: Sequence[Trace], tolerance: float) -> ParityMismatch | None:
    """The first entry, in the order of the one-rank trace, in which some rank differs by more than the tolerance."""
    reference = {entry.what: entry.values for entry in single_rank}
    errors = defaultdict[str, dict[int, float]](dict)  # of every entry, by rank: the largest
    covered = Counter[str]()  # elements that ranks have
    for rank, trace in enumerate(ranks):
        for entry in trace:
            what = entry.what
            error = relative_error(entry, reference[what])
            by_rank = errors[what]
            largest = by_rank.get(rank, 0.0)
            by_rank[rank] = max(largest, error)
            covered[what] += entry.values.numel()
    # In the order of the one-rank trace: what goes wrong first is named, not what follows from it.
    for what, values in reference.items():
        count = values.numel()
        if covered[what] < count:
            missing = f"{what}: only {covered[what]} of {count} elements are held by any rank, and it"
            return ParityMismatch(missing, 1.0, [])
        by_rank = errors[what]
        wrong = sorted(rank for rank, error in by_rank.items() if error > tolerance)
        if wrong:
            largest = max(by_rank.values())
            return ParityMismatch(what, largest, wrong)
    return None
