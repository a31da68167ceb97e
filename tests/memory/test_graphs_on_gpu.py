"""Steps as one CUDA graph on a GPU: the bits of eager steps, and a host that waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moefold.layout.axes import single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import validation_loss
from moefold.train.step import take_next_step
from tests.memory.test_graphs import as_bytes, figures, state_of
from tests.train.test_fp8_runs import counting_corpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = [
    *("--model.layers", "2", "--model.hidden", "128", "--model.moe.ffn", "128", "--model.moe.experts", "8"),
    *("--model.attention.heads", "4", "--model.attention.kv_heads", "2", "--model.attention.head_dim", "32"),
    *("--data.seq_len", "128", "--train.global_batch", "4", "--train.micro_batch", "2", "--optim.warmup", "10"),
    *("--train.device", "cuda", "--train.precision", "bf16", "--train.steps", "200", "--optim.lr", "3e-3"),
]


def assemble(graphs: str, words: str) -> Run:
    config = resolve_recipe("tiny", [*SMALL, "--memory.graphs", graphs, *words.split()], 1)
    return assemble_run(config, single_rank_world("cuda"), Path("."), counting_corpus())


def differing(one: Run, two: Run) -> list[int]:
    pairs = zip(state_of(one), state_of(two), strict=True)
    return [number for number, (x, y) in enumerate(pairs) if not torch.equal(as_bytes(x), as_bytes(y))]


def is_captured(run: Run) -> bool:
    return run.graph is not None and run.graph.captured is not None


def test_200_replays_with_other_batches_routing_and_learning_rates_have_the_bits_of_eager_steps():
    eager, graphed = assemble("none", ""), assemble("whole", "")
    loads: set[str] = set()
    for step in range(200):
        right, mine = figures(take_next_step(eager)), figures(take_next_step(graphed))
        assert right == mine, f"step {step + 1}"
        loads.add(str(right[3]))
    assert is_captured(graphed)
    assert len(loads) > 150, "the routing hardly changed"
    assert differing(eager, graphed) == []


ADAPTERS = "--lora.rank 16 --model.moe.balance.bias_rate 0"
VARIANTS = {
    "documents": "--data.attend document",
    "jitter and biases": "--model.moe.router.jitter 0.1 --model.moe.balance.bias_rate 0.01",
    "balance over the global batch": "--model.moe.balance.aux_loss 0.01 --model.moe.balance.aux_over global_batch",
    "capacity": "--model.moe.capacity.factor 1.0",
    "lean state": "--train.micro_batch 4 --optim.main split --optim.moments bf16 --optim.gradients bf16",
    "stochastic rounding": "--optim.moments bf16 --optim.rounding stochastic",
    "Muon": "--optim.rule muon",
    "recompute": "--memory.recompute norm,core,moe@0",
    "FP8 blocks": "--precision.recipe fp8_block",
    "FP8 rows": "--precision.recipe fp8_row",
    "MXFP8": "--precision.recipe mxfp8",
    "NVFP4": "--precision.recipe nvfp4 --precision.exclude_last 0",
    "delayed scales": "--precision.recipe fp8_row --precision.scaling delayed --precision.history 3",
    "weights stored in FP8": "--precision.recipe fp8_block --precision.storage fp8",
    "adapters": f"{ADAPTERS} --lora.base plain",
    "adapters beside NF4, layers recomputed": f"{ADAPTERS} --lora.base nf4 --memory.recompute layer",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_give_the_bits_of_eager_steps(variant: str):
    """With validation between them, and one step that is looked into."""
    words = f"{VARIANTS[variant]} --observe.fp8_every 8"
    eager, graphed = assemble("none", words), assemble("whole", words)
    for step in range(12):
        assert figures(take_next_step(eager)) == figures(take_next_step(graphed)), f"step {step + 1}"
        if step % 3 == 0:
            assert validation_loss(eager) == validation_loss(graphed)
    assert is_captured(graphed)
    assert differing(eager, graphed) == []


@contextmanager
def waits_refused() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_step_waits_for_nothing():
    run = assemble("whole", "")
    for _ in range(5):
        take_next_step(run)
    assert is_captured(run)
    torch.cuda.synchronize()
    with waits_refused():
        reports = [take_next_step(run) for _ in range(3)]
    assert all(report.loss == report.loss for report in reports)


def test_the_trace_of_a_replayed_step_has_no_wait():
    run = assemble("whole", "")
    for _ in range(5):
        take_next_step(run)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("replayed step"):
            take_next_step(run)
        torch.cuda.synchronize()
    events = list(profiler.events() or [])
    (mark,) = [event for event in events if event.name == "replayed step" and str(event.device_type).endswith("CPU")]
    inside = [event.name for event in events if mark.time_range.start <= event.time_range.start < mark.time_range.end]
    assert any("GraphLaunch" in name for name in inside)
    assert not [name for name in inside if "Synchronize" in name]
