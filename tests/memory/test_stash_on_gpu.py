"""The stash of experts' rows on a GPU, with moefold's own kernels: the bits of a run that keeps them, also where rows
find no room and the step is run again, in replays of a CUDA graph too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.config.run import Config
from moefold.kernels.experts.page_grid import MOST
from moefold.layout.axes import single_rank_world
from moefold.model.moe.router import expert_loads
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run
from moefold.train.parity import trace_run
from moefold.train.step import take_next_step
from tests.memory.test_graphs import figures, same_state
from tests.memory.test_graphs_on_gpu import SMALL, is_captured
from tests.memory.test_policies_on_gpu import STEPS, configured, kept_trace
from tests.memory.test_recompute import differing
from tests.memory.test_stash import PLENTY, played_run, stash_in, stashing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    ("plain", "stack", "norm,core@1,experts@2"),
    ("tokens ahead", "stack", ""),
    ("capacity", "pages", ""),
    ("documents", "pages", "moe@1"),
]


@pytest.mark.parametrize(("mechanism", "order", "recompute"), CASES)
def test_a_stashing_run_is_equal_to_the_bit(mechanism: str, order: str, recompute: str):
    config = stashing(configured(mechanism), order, PLENTY, recompute)
    assert differing(trace_run(config, single_rank_world("cuda"), STEPS), kept_trace(mechanism)) == []


def bounded_config(graphs: str) -> Config:
    """Every choice may have a row; a played rank has about half of them."""
    words = ["--model.moe.dense_layers", "0", "--train.global_batch", "1", "--train.micro_batch", "1"]
    return resolve_recipe("tiny", [*SMALL, *words, "--memory.graphs", graphs], 1)


def with_room(config: Config, order: str) -> Config:
    """With the pages of a step whose routing is not skewed, and a quarter more."""
    run = played_run(stashing(config, order, PLENTY), (0,))
    take_next_step(run)
    pool = stash_in(run).pool
    assert pool is not None
    most = int(pool.state[MOST])
    return stashing(config, order, most + most // 4)


def push_to_played_rank(run: Run, push: float) -> None:
    """Let every token choose experts of the played rank, with biases of selection."""
    for load in expert_loads(run.model):
        held = len(load.bias_E) // 2
        load.bias_E[:held] += push


@pytest.mark.parametrize("graphs", ["none", "whole"])
@pytest.mark.parametrize("order", ["stack", "pages"])
def test_skewed_routing_overflows_and_the_step_is_run_again_with_the_same_bits(order: str, graphs: str):
    eager = bounded_config("none")
    room = with_room(eager, order)
    kept = played_run(eager, (0,))
    bounded = played_run(replace(room, memory=replace(room.memory, graphs=graphs)), (0,))
    repeated: list[int] = []
    for push in (0.0, 0.0, 0.0, 0.0, 0.0, 9.0, -9.0):
        for run in (kept, bounded):
            push_to_played_rank(run, push)
        assert figures(take_next_step(kept)) == figures(take_next_step(bounded))
        repeated.append(bounded.row_guard.repeated_steps)
    assert repeated == [0, 0, 0, 0, 0, 1, 1]
    assert is_captured(bounded) == (graphs == "whole")
    assert same_state(kept, bounded)
