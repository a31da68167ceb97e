"""Is a layout equal to one rank? Run both for a few steps, compare everything, and name the first thing that differs.

A trace holds, for every step and in the order in which they come about: the loss, the tokens each expert got, every
gradient, the gradient norm, every updated weight. A rank's trace has its own parts of tensors, each with its place in
the whole; they are held against the same places of the one-rank trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

import numpy as np
import torch

from moefold.checkpoint.format.boxes import element_count
from moefold.checkpoint.live.logical_tensors import boxes_in_whole
from moefold.config.rules import check_config
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.data.corpus import Corpus
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters
from moefold.model.moe.balance import ExpertLoad, LayerLoads
from moefold.train.assemble import Run, assemble_run
from moefold.train.step import train_step

ROUTINGS = ("learned", "skewed", "one expert", "empty experts")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}


@dataclass(frozen=True)
class TraceEntry:
    """One value or tensor part at one moment. `starts` is its place in the whole."""

    what: str
    starts: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class ParityMismatch:
    """The first thing that differs: what, by how much (relative), and on which ranks."""

    what: str
    error: float
    ranks: list[int]

    def __str__(self) -> str:
        return f"{self.what} differs by {self.error:.2e} (relative) on rank{'s' * (len(self.ranks) > 1)} {self.ranks}"


def shrink_config(config: Config, world: int) -> Config:
    """The same mechanisms and degrees at sizes that a CPU handles in a second; refused if the degrees fit no world of
    that many ranks."""
    m, a, moe, p = config.model, config.model.attention, config.model.moe, config.parallel
    spread = p.tp * (p.cp if p.context in ("all_to_all", "hierarchical") else 1)
    kv_heads = lcm(spread, min(a.kv_heads, 2))
    attention = replace(
        a,
        head_dim=8,
        rope_dim=4 if a.rope_dim else 0,
        q_rank=12 if a.q_rank else 0,
        kv_rank=16,
        value_dim=6 if a.value_dim else 0,
        window=min(a.window, 3),
        kv_heads=kv_heads,
        heads=kv_heads * min(2, max(1, a.heads // a.kv_heads)),
    )
    experts = lcm(p.ep, min(moe.experts, 8), min(moe.balance.devices, 4))
    groups = min(moe.router.groups, 4)
    layers, dense = max(2 * moe.every, p.pp * config.pipeline.vpp), min(moe.dense_layers, 1)
    moe = replace(
        moe,
        experts=experts,
        latent=16 if moe.latent else 0,
        top_k=min(moe.top_k, experts * max(1, groups // 2) // groups, 4),
        ffn=8 * p.etp,
        shared_ffn=8 * p.tp if moe.shared_ffn else 0,
        dense_layers=dense,
        router=replace(moe.router, groups=groups, groups_chosen=min(moe.router.groups_chosen, max(1, groups // 2))),
        balance=replace(moe.balance, devices=min(moe.balance.devices, 4)),
        capacity=replace(moe.capacity, over="full_sequence", pad=False),
    )
    sizes = {"layers": layers, "hidden": 32, "vocab": lcm(256, p.tp), "dense_ffn": 16 * p.tp, "mtp": min(m.mtp, 2)}
    model = replace(m, **sizes, attention=attention, moe=moe)
    seq_len = lcm(p.tp * p.cp * 2, 8)
    dp = max(1, world // (p.tp * p.cp * p.pp))
    batch = dp * (2 if p.pp == 1 else 2 * p.pp + 1)
    train = replace(config.train, device="cpu", global_batch=batch, micro_batch=1, steps=8)
    data = replace(config.data, source="stdlib", files=(), tokenizer="byte", seq_len=seq_len)
    # Without clipping, gradients can be seen as they are; with a small eps Adam would turn the rounding of gradients
    # near zero into steps of full size.
    plain = {"main": "fp32", "moments": "fp32", "gradients": "fp32", "gradient_reduce": "fp32"}
    optim = replace(config.optim, warmup=0, lr=1e-2, eps=1e-3, max_norm=1e9, **plain)
    pipeline = replace(config.pipeline, layout="")  # the user's is for other numbers of layers
    small = replace(config, model=model, data=data, train=train, optim=optim, pipeline=pipeline)
    return check_config(small, world)


def single_rank_config(config: Config) -> Config:
    """The same run on a single rank, in larger microbatches where nothing is counted per microbatch."""
    moe = config.model.moe
    micro_batch = 2 if moe.capacity.factor == 0 and moe.balance.aux_over != "microbatch" else 1
    plain = replace(config, parallel=ParallelConfig(), pipeline=PipelineConfig())
    return replace(plain, train=replace(config.train, micro_batch=micro_batch))


def trace_run(config: Config, world: World, steps: int, routing: str = "learned") -> list[TraceEntry]:
    """What this rank sees in the first steps of a run on random tokens."""
    run = assemble_run(config, world, Path("."), corpus=random_corpus(config))
    skew_routing_biases(run, routing)
    seen: list[TraceEntry] = []
    for _ in range(steps):
        seen += trace_one_step(run)
    return seen


def random_corpus(config: Config) -> Corpus:
    """Random tokens in documents of three on average, shorter than the shortest sequence."""
    random = np.random.default_rng(5)
    tokens = random.integers(0, 256, size=200 * config.data.seq_len).astype(np.uint8)
    starts = np.flatnonzero(random.random(len(tokens)) < 1 / 3)
    starts[0] = 0
    return Corpus(tokens, tokens, starts, starts)


def skew_routing_biases(run: Run, routing: str) -> None:
    """Lean the selection biases so that routing is as uneven as asked."""
    for load in (m for m in run.model.modules() if isinstance(m, ExpertLoad)):
        number = torch.arange(len(load.bias_E))
        lean = {
            "learned": torch.zeros(len(number)),
            "skewed": -0.1 * number,
            "one expert": -100.0 * number,
            "empty experts": -100.0 * (number % 2),
        }[routing]
        load.bias_E.copy_(lean)


def trace_one_step(run: Run) -> list[TraceEntry]:
    report = train_step(run, run.loader.next())
    run.parameters.await_all_buckets()
    at = f"step {run.step}: "
    weights = [
        TraceEntry(f"{at}weight {p.name}", tuple(s for s, _ in p.part), p.tensor.detach().clone())
        for p in declared_parameters(run.model)
    ]
    return [
        TraceEntry(f"{at}loss", (), torch.tensor(report.loss, dtype=torch.float64)),
        *expert_token_counts(report.loads, at),
        *local_gradients(run, at),
        TraceEntry(f"{at}gradient norm", (), torch.tensor(report.grad_norm, dtype=torch.float64)),
        *weights,
    ]


def expert_token_counts(loads: LayerLoads, when: str) -> list[TraceEntry]:
    """How many tokens each expert of this rank's layers got."""
    return [
        TraceEntry(f"{when}tokens of each expert of layer {layer}", (0,), counts_E.double())
        for layer, counts_E in zip(loads.layers, loads.counts_LE, strict=True)
    ]


def local_gradients(run: Run, when: str) -> list[TraceEntry]:
    """This rank's share of every gradient, as boxes of the whole parameter."""
    seen: list[TraceEntry] = []
    for bucket, share in zip(run.gradients.buckets, run.gradients.gradient_shares(), strict=True):
        for parameter, first, last, at in bucket.pieces():
            for begin, box in boxes_in_whole(first, last, parameter):
                sizes, start = [size for _, size in box], at + begin - first
                values = share[start : start + element_count(box)].view(sizes).clone()
                seen.append(TraceEntry(f"{when}gradient {parameter.name}", tuple(s for s, _ in box), values))
    return seen


def first_mismatch(
    whole: Sequence[TraceEntry], ranks: Sequence[Sequence[TraceEntry]], tolerance: float
) -> ParityMismatch | None:
    """The first thing, in the order of the one-rank trace, in which some rank differs by more than the tolerance. A
    tensor's error is measured against the size of the whole tensor, so that a part of tiny numbers does not count as
    wrong for its rounding."""
    reference = {seen.what: seen.values for seen in whole}
    worst: dict[str, dict[int, float]] = {}
    covered: dict[str, float] = dict.fromkeys(reference, 0.0)
    for rank, trace_of_rank in enumerate(ranks):
        for seen in trace_of_rank:
            expected = reference[seen.what][
                tuple(slice(s, s + n) for s, n in zip(seen.starts, seen.values.shape, strict=True))
            ]
            scale = reference[seen.what].double().norm() + 1e-30
            error = ((seen.values.double() - expected.double()).norm() / scale).item()
            found = worst.setdefault(seen.what, {})
            found[rank] = max(found.get(rank, 0.0), error if error == error else float("inf"))
            covered[seen.what] += seen.values.numel()
    for what in reference:
        if covered[what] < reference[what].numel():
            return ParityMismatch(
                f"{what}: only {covered[what]:.0f} of {reference[what].numel()} elements are held by any rank, and it",
                1.0,
                [],
            )
        bad = {rank: error for rank, error in worst[what].items() if error > tolerance}
        if bad:
            return ParityMismatch(what, max(bad.values()), sorted(bad))
    return None
