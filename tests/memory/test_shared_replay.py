"""Replays of a tape by two processes: the bits of ordinary steps; a helper that ends with its run, and no later."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.layout.axes import single_rank_world
from moefold.memory import shared_replay
from moefold.memory.shared_replay import (
    PERIOD,
    TRIALS,
    Helper,
    HelperEnded,
    SharedReplay,
    SharedTapeRecorder,
    TriedWays,
    one_thread,
)
from moefold.train.assemble import Run, assemble_run
from moefold.train.step import take_next_step
from tests.memory.test_graphs import VARIANTS, same_state, small_config, steps_agree
from tests.train.test_fp8_runs import counting_corpus

WITH_A_HELPER = 9 + 2 * TRIALS  # steps: three anew, one recorded, five timed, some by one process and some by two
pytestmark = [
    pytest.mark.alone,  # two processes that wait for each other: beside other work a step takes seconds
    pytest.mark.skipif(not shared_replay.has_two_cores(), reason="needs two cores of a Linux machine"),
]


@pytest.fixture(autouse=True)
def any_gain_will_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_replay, "LEAST_GAIN", 0.0)


def assembled(words: str, processes: int) -> Run:
    config = small_config(words)
    memory = replace(config.memory, tape=processes > 0, tape_processes=max(processes, 1))
    return assemble_run(replace(config, memory=memory), single_rank_world("cpu"), Path("."), counting_corpus())


def shared(run: Run) -> SharedReplay:
    assert run.graph is not None
    assert run.graph.captured is not None
    replay: Any = run.graph.captured.replay
    cells = [cell.cell_contents for cell in replay.__closure__]
    (found,) = [cell.__self__ for cell in cells if hasattr(cell, "__self__")]
    return found


@pytest.mark.parametrize("variant", ["plain", "documents", "capacity", "Muon with logit clipping", "jitter", "sinks"])
def test_replays_by_two_processes_give_the_bits_of_ordinary_steps(variant: str):
    plain, taped = assembled(VARIANTS[variant], 0), assembled(VARIANTS[variant], 2)
    assert steps_agree(plain, taped, WITH_A_HELPER)
    assert shared(taped).helper is not None
    assert same_state(plain, taped)


def with_a_helper() -> Run:
    run = assembled("", 2)
    for _ in range(WITH_A_HELPER):
        take_next_step(run)
    return run


def share_every_step(run: Run) -> Helper:
    replay = shared(run)
    assert replay.helper is not None
    replay.ways = TriedWays([replay.helper.replay])
    return replay.helper


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_helper_ends_with_the_run_and_not_at_an_interrupt():
    run = with_a_helper()
    helper = share_every_step(run)
    process = helper.pair.helper
    os.kill(process, signal.SIGTERM)
    os.kill(process, signal.SIGINT)
    take_next_step(run)
    assert is_there(process)
    del run, helper
    gc.collect()
    assert not is_there(process)


def test_a_helper_that_has_ended_is_told_of_in_the_next_step():
    run = with_a_helper()
    helper = share_every_step(run)
    os.kill(helper.pair.helper, signal.SIGKILL)
    with pytest.raises(HelperEnded, match="has ended"):
        take_next_step(run)


def test_without_a_gain_or_room_one_process_goes_on_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_replay, "LEAST_GAIN", 100.0)
    plain, taped = assembled("", 0), assembled("", 2)
    assert steps_agree(plain, taped, WITH_A_HELPER)
    assert shared(taped).helper is None
    assert same_state(plain, taped)
    monkeypatch.setattr(shared_replay, "SHARED_MEMORY", "/nowhere")
    assert "/nowhere" in shared_replay.move_to_shared_memory([])


def test_it_tells_why_one_process_goes_on_alone(monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(2, 300_000)

    def remark_on(function: Callable[[Tensor], Tensor]) -> str:
        recorder = SharedTapeRecorder()

        def work() -> None:
            for row in x:
                row.copy_(function(row))

        _, replay = recorder.record(work)
        assert not isinstance(replay, str)
        for _ in range(WITH_A_HELPER):
            replay()
        return ", ".join(recorder.remarks)

    assert "aten::rand_like" in remark_on(torch.rand_like)
    assert not torch.equal(x[0], x[1]), "two processes have drawn the same numbers"
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (1, 1))
        assert "1 at most" in remark_on(torch.exp)
    assert remark_on(torch.exp) == ""
    with monkeypatch.context() as patch:  # what has been moved needs no room again
        patch.setattr(resource, "getrlimit", lambda _: (3, 3))
        assert remark_on(torch.exp) == ""
    monkeypatch.setattr(shared_replay, "LEAST_GAIN", 100.0)
    assert "100.0 is the least" in remark_on(torch.exp)


def test_a_step_that_was_interrupted_is_not_followed_by_one_out_of_step():
    run = with_a_helper()
    helper = share_every_step(run)

    def interrupt() -> None:
        raise KeyboardInterrupt

    place = len(helper.own) // 2
    helper.own.insert(place, (interrupt, (), {}))
    with pytest.raises(KeyboardInterrupt):
        take_next_step(run)
    assert not is_there(helper.pair.helper)
    del helper.own[place]
    with pytest.raises(HelperEnded):
        take_next_step(run)


def test_a_step_that_is_looked_into_has_the_threads_of_the_others():
    run = assembled("", 2)
    threads: list[int] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        threads.append(torch.get_num_threads())
        yield

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run.phase = noted
        take_next_step(run)
    finally:
        torch.set_num_threads(before)
    assert threads
    assert set(threads) == {1}


def test_of_two_ways_the_faster_runs_and_both_are_tried_again(monkeypatch: pytest.MonkeyPatch):
    runs: list[str] = []
    seconds = {"first": 2.0, "second": 1.0}
    monkeypatch.setattr(shared_replay, "seconds_of", lambda way: way() or seconds[runs[-1]])
    ways = TriedWays([lambda: runs.append("first"), lambda: runs.append("second")])
    for _ in range(PERIOD):
        ways.run()
    assert runs.count("first") == TRIALS
    seconds["second"] = 3.0
    runs.clear()
    for _ in range(PERIOD):
        ways.run()
    assert runs.count("second") == TRIALS


def test_steps_run_on_one_thread_and_what_is_between_them_on_all():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
