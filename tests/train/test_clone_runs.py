"""Runs whose hot experts are cloned: the losses and gradients of runs without clones, on more even ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, create_world
from moefold.model.moe.clones import ExpertClones
from moefold.observe.router_stats import RouterCounts, balance_summary
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import train_step
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks

RANKS, EXPERTS = 4, 8
REPLICAS = ParallelConfig(ep=2, dispatcher="all_to_all")
STAGES = replace(REPLICAS, pp=2)
LAYOUTS = {
    "replicas": (REPLICAS, PipelineConfig()),
    "paired": (STAGES, PipelineConfig(vpp=2, pair=True, fill=False)),
    "deferred": (STAGES, PipelineConfig(schedule="zb_h1")),
}
WITHOUT, NOW, PREVIOUS = "without", "now", "previous"
DECIDED = {WITHOUT: {}, NOW: {"clone_slots": 2}, PREVIOUS: {"clone_slots": 2, "clone_decision": PREVIOUS}}


class Curve(NamedTuple):
    losses: list[float]
    norms: list[float]
    balance: list[dict[str, list[float]]]


def sized(layers: int, ranks: int) -> Config:
    """A tiny model with shared experts, in fp64, whose selection biases stay as they are."""
    tiny = PRESETS["tiny"]()
    moe = with_moe_keys(tiny.model.moe, bias_rate=0.0, experts=EXPERTS, shared_ffn=8)
    small = shrink_config(replace(tiny, model=replace(tiny.model, moe=moe)), ranks)
    moe = replace(small.model.moe, experts=EXPERTS, top_k=2)
    train = replace(small.train, precision="fp64", global_batch=ranks, micro_batch=1)
    optim = replace(small.optim, warmup=1, lr=0.01)
    return replace(small, model=replace(small.model, moe=moe, layers=layers), train=train, optim=optim)


def skew_routing(run: Run) -> None:
    """Selection biases that make a few experts of all ranks hot."""
    for load in run.model.loads():
        place = torch.arange(EXPERTS) * 3 % EXPERTS
        load.bias_E.copy_(0.02 / (place + 1))


def train(config: Config, world: World, steps: int) -> Curve:
    run = assemble_run(config, world, Path("."), random_corpus(config))
    experts = {name for name in run.gradients.number_of if ".experts." in name}
    several = experts & run.executor.several_gradients
    assert several == (experts if config.parallel.clone_slots else set()), "a bucket would leave without their clones'"
    for module in run.model.modules():
        if isinstance(module, ExpertClones) and config.parallel.pp * config.parallel.ep < world.size:
            assert module._forward_pre_hooks, "nothing waits for weights that replicas still send"
    skew_routing(run)
    curve = Curve([], [], [])
    for _ in range(steps):
        report = train_step(run, run.loader.next_batch())
        curve.losses.append(report.loss)
        curve.norms.append(report.grad_norm)
        layers, *figures = report.loads
        counts = RouterCounts(layers, *(figure.tolist() for figure in figures))
        curve.balance.append(balance_summary(counts))
    return curve


def long_curves(world: World) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for decision, keys in DECIDED.items():
        config = replace(sized(1, 2), parallel=replace(REPLICAS, **keys))
        found[decision] = train(config, world, 50)
    return found


@cache
def fifty_steps() -> list[dict[str, Curve]]:
    return run_ranks(long_curves, 2, ep=2)


def curves_by_layout(world: World) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    cases = [("replicas", WITHOUT), ("replicas", PREVIOUS), ("paired", NOW), ("deferred", NOW)]
    for layout, decision in cases:
        parallel, pipeline = LAYOUTS[layout]
        here = create_world(world.rank, world.size, world.device, parallel)
        config = replace(sized(4, RANKS), parallel=replace(parallel, **DECIDED[decision]), pipeline=pipeline)
        found[layout if decision != WITHOUT else WITHOUT] = train(config, here, 2)
    return found


def assert_same_curve(found: Curve, expected: Curve) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=1e-9)
    assert found.norms == pytest.approx(expected.norms, abs=1e-9)


@pytest.mark.extended
@pytest.mark.parametrize("decision", [NOW, PREVIOUS])
def test_fifty_steps_of_skewed_routing_have_the_losses_and_gradients_without_clones(decision: str):
    for curves in fifty_steps():
        assert_same_curve(curves[decision], curves[WITHOUT])


@pytest.mark.extended
def test_the_metrics_tell_how_even_ranks_are_with_clones_and_would_be_without():
    curves = fifty_steps()[0]
    assert "rank_rows" not in curves[WITHOUT].balance[0]
    means: dict[str, float] = {}
    for decision in (NOW, PREVIOUS):
        for name in ("rank_rows", "rank_rows_without"):
            rows = [balance[name][0] for balance in curves[decision].balance]
            means[f"{decision} {name}"] = sum(rows) / len(rows)
    without = means["now rank_rows_without"]
    assert without == means["previous rank_rows_without"] > 1.3
    assert means["now rank_rows"] < 1.07
    assert means["previous rank_rows"] < 1.25


@pytest.mark.extended
def test_clones_go_with_replicas_paired_slots_and_deferred_gradients():
    for curves in run_ranks(curves_by_layout, RANKS):
        without = curves.pop(WITHOUT)
        for curve in curves.values():
            assert_same_curve(curve, without)
            assert sum(curve.balance[-1]["clone_bytes"]) > 0
