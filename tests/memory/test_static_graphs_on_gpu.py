"""Graphs of static steps on a GPU: the bits of eager steps, and fewer launches by the host."""

from __future__ import annotations

import pytest
import torch

from moefold.train.assemble import Run
from moefold.train.evaluate import validation_loss
from moefold.train.step import take_next_step
from tests.memory.test_graphs import figures
from tests.memory.test_graphs_on_gpu import assemble, differing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VARIANTS = {
    "two microbatches": "",
    "four microbatches": "--train.micro_batch 1",
    "documents": "--data.attend document",
    "jitter and biases": "--model.moe.router.jitter 0.1 --model.moe.balance.bias_rate 0.01",
    "capacity and balance": "--model.moe.capacity.factor 1.0 --model.moe.balance.aux_loss 0.01",
    "shared experts": "--model.moe.shared_ffn 128 --model.moe.dense_layers 1",
    "lean state": "--train.micro_batch 4 --optim.main split --optim.moments bf16 --optim.gradients bf16",
    "fp32": "--train.precision fp32",
    "recompute": "--memory.recompute moe@0",
    "recompute inside": "--memory.recompute norm,core,experts",
    "deferred weight gradients": "--pipeline.defer true --train.micro_batch 1",
    "FP8 blocks": "--precision.recipe fp8_block --model.moe.ffn 128 --model.hidden 128",
    "FP8, scales of the steps before": "--precision.recipe fp8_row --precision.scaling delayed --precision.history 3",
    "units updated in backward": "--optim.when backward --optim.clip_by unit",
}


def slots(run: Run) -> int:
    assert run.static_graphs is not None
    return run.static_graphs.slot_count


@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_give_the_bits_of_eager_steps(variant: str):
    """With validation between them."""
    eager, graphed = assemble("none", VARIANTS[variant]), assemble("static", VARIANTS[variant])
    for step in range(12):
        assert figures(take_next_step(eager)) == figures(take_next_step(graphed)), f"step {step + 1}"
        if step % 3 == 0:
            assert validation_loss(eager) == validation_loss(graphed)
    assert slots(graphed) >= 2
    assert differing(eager, graphed) == []


def test_200_replays_with_other_batches_routing_and_learning_rates_have_the_bits_of_eager_steps():
    eager, graphed = assemble("none", ""), assemble("static", "")
    for step in range(200):
        assert figures(take_next_step(eager)) == figures(take_next_step(graphed)), f"step {step + 1}"
    assert slots(graphed) == 2  # attention and router of two layers
    assert differing(eager, graphed) == []


def launches_of_a_step(run: Run) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        take_next_step(run)
        torch.cuda.synchronize()
    return sum("Launch" in event.name for event in profiler.events() or [])


def test_the_host_launches_less_and_memory_does_not_grow():
    eager, graphed = assemble("none", ""), assemble("static", "")
    for run in (eager, graphed):
        for _ in range(6):
            take_next_step(run)
    before = launches_of_a_step(eager)
    assert launches_of_a_step(graphed) < before
    allocated: list[int] = []
    for _ in range(3):
        take_next_step(graphed)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] <= allocated[0] + 2**20
