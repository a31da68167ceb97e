"""Nonsense never reaches the weights, though nobody waits to see whether a step was sound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.bench.curves import curves_config
from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.errors import RunFailure
from moefold.config.run import CapacityConfig, ParallelConfig
from moefold.layout.axes import World, single_rank_world
from moefold.layout.labels import IGNORE_INDEX
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.non_finite import refuse_non_finite
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import StepReport, train_step
from tests.support.ranks import run_ranks

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def small_run(precision: str = "fp32", moments: str = "fp32") -> Run:
    config = shrink_config(PRESETS["tiny"](), 1)
    config = replace(config, train=replace(config.train, precision=precision))
    config = replace(config, optim=replace(config.optim, moments=moments))
    return assemble_run(config, single_rank_world(), Path("."), random_corpus(config))


def everything(run: Run) -> list[torch.Tensor]:
    """Weights, biases of routers, main weights and moments."""
    state = [values.clone() for *_, values in run.optimizer.state()]
    return [*(x.detach().clone() for x in run.model.state_dict().values()), *state]


def spoil(run: Run) -> list[torch.utils.hooks.RemovableHandle]:
    """Every gradient that flows through the last norm is no number."""
    return [run.model.head.norm.register_forward_hook(lambda *found: tuple(x * torch.nan for x in found[-1]))]


@pytest.mark.parametrize(("precision", "moments"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_a_step_that_is_nonsense_changes_nothing_and_neither_do_those_after_it(precision: str, moments: str):
    run = small_run(precision, moments)
    train_step(run, run.loader.next_batch())
    before = everything(run)
    hooks = spoil(run)
    report = train_step(run, run.loader.next_batch())
    for hook in hooks:
        hook.remove()
    sound_again = train_step(run, run.loader.next_batch())  # begun before anybody has read the one before
    assert all(torch.equal(a, b) for a, b in zip(before, everything(run), strict=True))
    with pytest.raises(RunFailure, match="step 2: loss is nan and gradient norm is nan; the weights were not touched"):
        refuse_non_finite(run, report)
    assert sound_again.loss == sound_again.loss


def test_a_sound_step_is_not_refused_and_changes_the_weights():
    run = small_run()
    before = everything(run)
    report = train_step(run, run.loader.next_batch())
    refuse_non_finite(run, report)
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(run), strict=True))


def test_a_batch_with_nothing_to_learn_from_is_no_nonsense():
    run = small_run()
    batch = run.loader.next_batch()
    report = train_step(run, replace(batch, labels_BS=torch.full_like(batch.labels_BS, IGNORE_INDEX)))
    refuse_non_finite(run, report)
    assert report.loss == 0
    refuse_non_finite(run, train_step(run, run.loader.next_batch()))


def test_a_report_can_be_read_long_after_its_step():
    """What it tells is of its own step, whatever has happened since."""
    run, other = small_run(), small_run()
    late = [train_step(run, run.loader.next_batch()) for _ in range(3)]
    at_once = []
    for _ in range(3):
        report = train_step(other, other.loader.next_batch())
        at_once.append((report.number, report.loss, report.grad_norm, report.tokens, report.loads.counts_LE.tolist()))
    read = [(r.number, r.loss, r.grad_norm, r.tokens, r.loads.counts_LE.tolist()) for r in late]
    assert read == at_once
    assert all(report.seconds > 0 for report in late)


def run_on_gpu(gradients: str = "fp32", main: str = "fp32", capacity: CapacityConfig | None = None) -> Run:
    """Of sizes that every fast kernel takes."""
    config = curves_config("cuda", 100)
    moe = replace(config.model.moe, capacity=capacity or CapacityConfig())
    config = replace(config, model=replace(config.model, moe=moe))
    config = replace(config, optim=replace(config.optim, gradients=gradients, main=main))
    config = replace(config, train=replace(config.train, global_batch=4, micro_batch=4 if gradients == "bf16" else 2))
    return assemble_run(config, single_rank_world("cuda"), Path("."), random_corpus(config))


def steps(run: Run, count: int) -> list[StepReport]:
    return [train_step(run, run.loader.next_batch()) for _ in range(count)]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    ("gradients", "main", "capacity"),
    [
        ("fp32", "fp32", CapacityConfig()),
        ("bf16", "split", CapacityConfig()),
        ("fp32", "fp32", CapacityConfig(factor=1.25, pad_rows=16)),
        ("fp32", "fp32", CapacityConfig(factor=1.0, pad=True)),
    ],
)
def test_on_a_gpu_a_step_waits_for_nothing(gradients: str, main: str, capacity: CapacityConfig):
    run = run_on_gpu(gradients, main, capacity)
    steps(run, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reports = steps(run, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(report.loss == report.loss and report.seconds > 0 for report in reports)


@pytest.mark.gpu
@gpu
def test_on_a_gpu_two_runs_of_one_seed_agree_to_the_bit():
    one, two = run_on_gpu(), run_on_gpu()
    losses = [[(r.loss, r.grad_norm) for r in steps(run, 8)] for run in (one, two)]
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(everything(one), everything(two), strict=True))


@pytest.mark.gpu
@gpu
def test_on_a_gpu_nonsense_changes_nothing_either():
    run = run_on_gpu()
    steps(run, 2)
    before = everything(run)
    hooks = spoil(run)
    report, *_ = steps(run, 2)
    for hook in hooks:
        hook.remove()
    steps(run, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(run), strict=True))
    with pytest.raises(RunFailure, match="step 3: loss is nan"):
        refuse_non_finite(run, report)


def bytes_of_tokens_sent(world: World) -> tuple[list[int], int]:
    """What a step reports for each layer, and what this rank really sent of tokens, forward and backward."""
    config = shrink_config(replace(PRESETS["tiny"](), parallel=ParallelConfig(ep=4, dispatcher="dedup")), 4)
    run = assemble_run(config, world, Path("."), random_corpus(config))
    with counted_bytes_sent() as sent:
        report = train_step(run, run.loader.next_batch())
    return report.loads.moved_L.tolist(), sent["rows", "ep"]


def test_moved_bytes_are_those_of_tokens_in_forward_over_all_ranks():
    reported, sent = zip(*run_ranks(bytes_of_tokens_sent, 4, ep=4), strict=True)
    assert sum(reported[0]) > 0
    assert all(layers == reported[0] for layers in reported)
    assert 2 * sum(reported[0]) == sum(sent), "backward sends as many again"
