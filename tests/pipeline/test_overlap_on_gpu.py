"""On a GPU the kernels of shared experts run while the comm lane's stream is busy, forward and backward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.bench.curves import curves_config
from moefold.config.run import Config
from moefold.dispatch.base import Receipt, Routing
from moefold.dispatch.local import LocalDispatcher
from moefold.layout.axes import single_rank_world
from moefold.model.steps import Step
from moefold.pipeline.executor import Executor, LossWeights
from moefold.pipeline.segments import Segments, one_segment, segments_of_one_microbatch
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import local_gradients, random_corpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CYCLES = 40_000_000  # of an exchange: about 20 ms, long enough for the host to launch all that can run beside it
MICROBATCHES = 2
EXCHANGES = 3  # of a layer and a microbatch: plan, combine, and combine's backward


class SlowExchange(torch.autograd.Function):
    """The identity, which keeps the stream it runs on busy in forward and in backward, as an exchange would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)  # pyright: ignore[reportPrivateUsage]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)  # pyright: ignore[reportPrivateUsage]
        return gradients[0].clone()


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow exchanges at the beginning of what the comm lane does: before the plan, and behind combine, whose backward
    begins with it. What runs beside them need not last longer than the kernels of a plan."""
    plan, combine = LocalDispatcher.plan, LocalDispatcher.combine

    def slow_plan(dispatcher: LocalDispatcher, routing: Routing) -> Receipt:
        torch.cuda._sleep(CYCLES)  # pyright: ignore[reportPrivateUsage]
        return plan(dispatcher, routing)

    def slow_combine(dispatcher: LocalDispatcher, y_RD: torch.Tensor, receipt: Receipt) -> Any:
        return SlowExchange.apply(combine(dispatcher, y_RD, receipt))

    monkeypatch.setattr(LocalDispatcher, "plan", slow_plan)
    monkeypatch.setattr(LocalDispatcher, "combine", slow_combine)


def config_with_shared_experts() -> Config:
    """Of sizes that every fast kernel takes."""
    config = curves_config("cuda", 100)
    moe = replace(config.model.moe, shared_ffn=512)
    train = replace(config.train, global_batch=MICROBATCHES, micro_batch=1)
    return replace(config, model=replace(config.model, moe=moe), train=train)


def one_step(run: Run) -> None:
    device = run.world.device
    one = torch.ones((), dtype=torch.float64, device=device)
    parts = list(run.loader.next_batch().microbatches(1))
    torch.cuda.synchronize()  # the batch is here: only strands run from now on
    run.gradients.begin()
    run.executor.train(parts, LossWeights(one[None], one))
    run.gradients.finish(one)
    torch.cuda.synchronize()


def exchanges_with_work_beside(trace: Path) -> tuple[int, int]:
    """Of all slow exchanges, how many had a kernel of another stream beside them; and how many there were."""
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    exchanges = [e for e in kernels if "spin" in e["name"]]
    beside = 0
    for each in exchanges:
        begin, end = each["ts"], each["ts"] + each["dur"]
        others = [e for e in kernels if e["args"]["stream"] != each["args"]["stream"]]
        beside += any(e["ts"] < end and begin < e["ts"] + e["dur"] for e in others)
    return beside, len(exchanges)


def test_kernels_of_shared_experts_run_beside_the_stream_of_the_comm_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow_down(monkeypatch)
    config = config_with_shared_experts()
    found = []
    gradients = []
    for cut in (one_segment, segments_of_one_microbatch):

        def cut_steps(self: Executor, steps: Sequence[Step], is_paired: bool, cut: Any = cut) -> Segments:
            return cut(steps)

        monkeypatch.setattr(Executor, "cut_steps", cut_steps)
        run = assemble_run(config, single_rank_world("cuda"), tmp_path, random_corpus(config))
        one_step(run)  # kernels are compiled
        path = tmp_path / f"{cut.__name__}.json"
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            one_step(run)
        profile.export_chrome_trace(str(path))
        found.append(exchanges_with_work_beside(path))
        gradients.append([(s.what, s.values) for s in local_gradients(run, "")])
    layers = config.model.layers * MICROBATCHES
    in_line, beside = found
    assert in_line == (0, EXCHANGES * layers)
    assert beside[1] == EXCHANGES * layers
    assert beside[0] >= 2 * layers, "forward beside plan, backward beside combine"
    for (what, values), (_, right) in zip(*gradients, strict=True):
        assert torch.equal(values, right), what
