"""An axis of one rank with a process group sends to itself: every collective, and whole runs, over gloo on the CPU and
over NCCL on a GPU, where no second rank is needed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefold.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max_no_grad,
    all_to_all,
    reduce_scatter,
)
from moefold.comm.grad_reduce import reduce_scatter_bf16, reduce_scatter_fp32
from moefold.comm.host_objects import broadcast_object, choose_object, first_object, gather_objects, scatter_objects
from moefold.comm.ring_shift import RingShift
from moefold.config.run import Config, ParallelConfig
from moefold.dispatch import build
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.memory.graphs import StepGraph
from moefold.model.moe.layer import symmetric_dispatchers
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus, trace_run
from moefold.train.step import take_next_step
from tests.memory.test_graphs import as_graph, figures
from tests.memory.test_recompute import differing

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8]
COLLECTIVES = {
    "all_gather": lambda x, axis: all_gather(x, axis),
    "reduce_scatter": lambda x, axis: reduce_scatter(x, axis),
    "all_reduce": lambda x, axis: all_reduce(x, axis),
    "all_to_all": lambda x, axis: all_to_all(x, [len(x)], [len(x)], axis),
}


@pytest.fixture(params=DEVICES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    device = torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    backend, owned = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=owned)
    try:
        yield create_world(0, 1, device, ParallelConfig(), groups_of_one=True)
    finally:
        dist.destroy_process_group()


def numbers(world: World, rows: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.arange(2 * rows, device=world.device).view(2, rows) % 100
    return x.to(dtype).T  # not contiguous


def test_a_world_of_one_rank_is_alone_unless_it_has_groups(world: World):
    assert all(axis.is_alone for axis in single_rank_world().axes.values())
    assert not any(axis.is_alone for axis in world.axes.values())


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_send_every_dtype_to_the_rank_itself(world: World, name: str):
    for dtype in DTYPES:
        for rows in (5, 0):
            x = numbers(world, rows, dtype)
            y = COLLECTIVES[name](x, world.everyone)
            assert y.data_ptr() != x.data_ptr() or not rows, "it was sent"
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_are_sent_back(world: World, name: str):
    x = numbers(world, 5, torch.float32).requires_grad_()
    dy = numbers(world, 5, torch.float32) + 1
    (dx,) = torch.autograd.grad(COLLECTIVES[name](x, world.everyone), x, dy)
    assert torch.equal(dx, dy)


def test_reductions_on_another_stream_and_flags_arrive(world: World):
    x = numbers(world, 8, torch.float32).flatten()
    assert torch.equal(reduce_scatter_fp32(x.clone(), world.everyone).arrived(), x)
    assert torch.equal(reduce_scatter_bf16(x.clone(), world.everyone).arrived(), x.bfloat16().float())
    assert torch.equal(all_reduce_max_no_grad(x.clone(), world.everyone), x)
    if world.device.type == "cuda":  # gloo sends to other ranks alone
        assert torch.equal(RingShift(x, world.everyone).arrived(), x)


def test_objects_of_the_host_arrive(world: World):
    everyone = world.everyone
    item = {"name": [1, 2]}
    assert broadcast_object(item, everyone) == item
    assert gather_objects(item, everyone) == [item]
    assert scatter_objects([item], everyone) == item
    assert first_object(item, everyone) == item
    assert first_object(None, everyone) is None
    assert choose_object(item, len, everyone) == 1


SIZES = [
    *("--model.layers", "2", "--model.hidden", "64", "--model.moe.experts", "4", "--model.moe.ffn", "64"),
    *("--data.seq_len", "64", "--data.tokenizer", "byte", "--train.global_batch", "4", "--train.micro_batch", "2"),
    *("--observe.tensorboard", "false", "--model.moe.balance.aux_loss", "0.1", "--train.precision", "fp32"),
]
RUNS = {
    "all_to_all": "--parallel.dispatcher all_to_all",
    "dedup": "--parallel.dispatcher dedup",
    "all_gather": "--parallel.dispatcher all_gather",
    "full sharding": "--shard.mode zero3",
    "Muon and tokens ahead": "--optim.rule muon --model.mtp 1",
}


def dispatcher_asked_for(config: Config, world: World) -> tuple[str, str]:
    return config.parallel.dispatcher, "also over one rank"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_exchanges_go_to_itself_has_the_bits_of_a_run_without(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
):
    device = ["--train.device", world.device.type]
    config = resolve_recipe("tiny", [*SIZES, *device, *RUNS[name].split()], 1)
    alone = trace_run(config, single_rank_world(world.device.type), 2)
    if config.parallel.dispatcher != "auto":
        monkeypatch.setattr(build, "choose_dispatcher", dispatcher_asked_for)
    assert differing(trace_run(config, world, 2), alone) == []


@pytest.mark.parametrize("world", ["cpu"], indirect=True)
def test_no_gather_is_under_way_when_a_graph_begins_also_behind_eager_steps(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Steps that record FP8 operands are eager, and leave gathers to the modules that wait for them."""
    words = [*SIZES, "--precision.recipe", "fp8_block", "--observe.fp8_every", "3", "--train.steps", "12"]
    config = resolve_recipe("tiny", words, 1)
    run = assemble_run(config, world, Path("."), random_corpus(config))
    as_graph(run, warm_up=1)
    take_step, under_way = StepGraph.take_step, []

    def note_and_take(graph: StepGraph, *step: Any) -> Any:
        under_way.append(list(run.parameters.under_way))  # pyright: ignore[reportAttributeAccessIssue]
        return take_step(graph, *step)

    monkeypatch.setattr(StepGraph, "take_step", note_and_take)
    for _ in range(8):
        take_next_step(run)
    assert 4 <= len(under_way) < 8, "some steps are eager"
    assert not any(under_way)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("world", ["cuda"], indirect=True)
def test_a_graph_of_a_whole_step_holds_its_exchanges(world: World):
    words = [*SIZES, "--train.device", "cuda", "--train.precision", "bf16", "--train.steps", "12"]
    config = resolve_recipe("tiny", words, 1)
    whole = replace(config, memory=replace(config.memory, graphs="whole"))
    corpus = random_corpus(config)
    eager = assemble_run(config, single_rank_world("cuda"), Path("."), corpus)
    graphed = assemble_run(whole, world, Path("."), corpus)
    for step in range(10):
        assert figures(take_next_step(eager)) == figures(take_next_step(graphed)), f"step {step + 1}"
    assert graphed.graph is not None
    assert graphed.graph.captured is not None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("stash", ["none", "pages"])
@pytest.mark.parametrize("world", ["cuda"], indirect=True)
def test_a_graph_of_a_whole_step_holds_the_exchanges_of_an_arena(
    world: World, stash: str, monkeypatch: pytest.MonkeyPatch
):
    """Experts whose rank writes to itself, without a capacity: their rows are known on the device alone."""
    words = [*SIZES, "--train.device", "cuda", "--train.precision", "bf16", "--train.steps", "12"]
    config = resolve_recipe("tiny", [*words, "--parallel.dispatcher", "symmetric"], 1)
    memory = replace(config.memory, graphs="whole", stash=stash, stash_gib=0.25)
    whole = replace(config, memory=memory)
    corpus = random_corpus(config)
    alone = assemble_run(config, single_rank_world("cuda"), Path("."), corpus)
    monkeypatch.setattr(build, "choose_dispatcher", dispatcher_asked_for)
    eager = assemble_run(config, world, Path("."), corpus)
    graphed = assemble_run(whole, world, Path("."), corpus)
    (dispatcher,) = symmetric_dispatchers(graphed.model)
    numbers_of_exchanges: list[int] = []
    for step in range(10):
        expected = figures(take_next_step(eager))
        assert figures(take_next_step(graphed)) == expected, f"step {step + 1}"
        assert figures(take_next_step(alone)) == expected, f"step {step + 1} without exchanges"
        numbers_of_exchanges.append(dispatcher.arena.number)
    dispatcher.arena.require_peers()
    assert graphed.graph is not None
    assert graphed.graph.captured is not None
    assert numbers_of_exchanges[0] > 0
    assert numbers_of_exchanges[4] == numbers_of_exchanges[-1], "the host issues none in a replay"
