"""A tape of a step on a CPU gives the bits of ordinary steps, in memory that is shared where lives do not overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.anatomy.tape_obstacles import tape_obstacles
from moefold.layout.axes import single_rank_world
from moefold.layout.tape_entries import one_entry
from moefold.memory.graphs import StepGraph, record_for_replay
from moefold.memory.tape import Memory, TapeRecorder, arena_offsets
from moefold.train.assemble import Run, assemble_run
from moefold.train.loop import introduction_lines
from moefold.train.step import take_next_step
from tests.memory.test_graphs import STEPS, VARIANTS, figures, same_state, small_config, steps_agree
from tests.support.runs import SMALL, command, corpus
from tests.train.test_fp8_runs import counting_corpus


def assembled(words: str, tape: bool) -> Run:
    config = small_config(words)
    memory = replace(config.memory, tape=tape)
    return assemble_run(replace(config, memory=memory), single_rank_world("cpu"), Path("."), counting_corpus())


@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        "documents",
        "capacity",
        "balance over the batch before",
        "Muon with logit clipping",
        "split main weights",
        "recompute",
        "jitter",
        "sinks",
    ],
)
def test_replays_give_the_bits_of_ordinary_steps(variant: str):
    plain, taped = assembled(VARIANTS[variant], tape=False), assembled(VARIANTS[variant], tape=True)
    assert plain.graph is None
    assert steps_agree(plain, taped, STEPS)
    assert taped.graph is not None
    assert taped.graph.captured is not None
    assert same_state(plain, taped)


def test_a_report_that_is_read_behind_later_replays_tells_of_its_own_step():
    """The training loop reads the report of a step when the next one has run."""
    plain, taped = assembled("", tape=False), assembled("", tape=True)
    right = [take_next_step(plain) for _ in range(STEPS)]
    mine = [take_next_step(taped) for _ in range(STEPS)]
    assert [figures(report) for report in mine] == [figures(report) for report in right]


def recorded(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    result, replay = record_for_replay(TapeRecorder(), work)
    replay()  # the recording itself has run
    return result, replay


def test_a_replay_reads_what_memory_holds_now():
    x = torch.arange(6.0).view(2, 3)
    result, replay = recorded(lambda: (x.t() * 2).softmax(0)[1:].sum())
    x.mul_(-1)
    replay()
    assert torch.equal(result, (x.t() * 2).softmax(0)[1:].sum())


def test_a_function_that_is_one_entry_may_read_values():
    x, total = torch.ones(3), torch.zeros(())

    @one_entry
    def add_if_positive(x: Tensor, into: Tensor) -> None:
        if x.sum().item() > 0:
            into += sum(x.tolist())

    def work() -> Tensor:
        add_if_positive(x * 2, total)
        return total

    _, replay = recorded(work)
    assert total == 6
    replay()
    x.neg_()
    replay()
    assert total == 12


@pytest.mark.parametrize("reads", ["tolist", "item", "nonzero", "__bool__"])
def test_work_that_reads_values_runs_and_is_not_replayed(reads: str):
    x = torch.ones(())

    def work() -> Tensor:
        getattr(x, reads)()
        return x + 1

    result, why = TapeRecorder().record(work)
    assert isinstance(why, str)
    assert "on the host" in why
    assert result == 2


def test_a_run_whose_step_reads_values_goes_on_without_a_tape():
    forced = "--kernels.force grouped_gemm=reference,grouped_gemm_weight=reference"
    plain, taped = assembled(forced, tape=False), assembled(forced, tape=True)
    assert steps_agree(plain, taped, STEPS)
    assert taped.graph is not None
    assert taped.graph.captured is None
    assert isinstance(taped.graph, StepGraph)
    assert "on the host" in taped.graph.obstacle


def test_a_run_that_asks_for_a_tape_and_has_none_says_why(tmp_path: Path):
    forced = ["--kernels.force", "grouped_gemm=reference,grouped_gemm_weight=reference", "--checkpoint.every", "0"]
    words = [*SMALL, *corpus(tmp_path), *forced, "--train.steps", "5", "--train.sample_tokens", "0"]
    code, output = command(
        ["train", "tiny", *words, "--out", str(tmp_path / "a"), "--memory.tape", "true"], tmp_path / "log"
    )
    assert code == 0, output
    assert output.count("memory.tape: every step runs anew: a list of a tensor's values is read on the host") == 1


def test_memory_is_shared_by_what_is_not_alive_at_the_same_time():
    lives = [(0, 1, 64), (1, 2, 64), (2, 3, 100), (0, 3, 64)]  # first and last call, bytes
    memories = [Memory(size, None, first, last) for first, last, size in lives]
    offsets, size = arena_offsets(memories, living={})
    for one, two in ((0, 1), (1, 2), (0, 3), (1, 3), (2, 3)):
        low, high = sorted((one, two), key=lambda number: offsets[number])
        assert offsets[low] + memories[low].size <= offsets[high]
    assert size == 128 + 64 + 64  # 100 bytes lie where the first lay


def test_what_stands_in_the_way_of_a_graph_stands_in_the_way_of_a_tape():
    plain = small_config()
    config = replace(plain, memory=replace(plain.memory, tape=True))
    assert not tape_obstacles(config, 1)
    assert tape_obstacles(config, 2) == ["a tape is of the step of a single rank, and this run has 2 ranks"]
    on_a_gpu = replace(config, train=replace(config.train, device="cuda"))
    assert tape_obstacles(on_a_gpu, 2) == ["train.device = cuda: a tape is of a step on a CPU"]
    samples = replace(config, data=replace(config.data, batch_of="samples"))
    (obstacle,) = tape_obstacles(samples, 1)
    assert "memory.tape = true" in obstacle, "a reader did not set memory.graphs"
    assert tape_obstacles(plain, 1) == ["memory.tape = false"]


def test_a_run_tells_what_stands_in_the_way_of_its_tape():
    run = assembled("--optim.clip_by previous", tape=True)
    assert run.graph is None
    (told,) = [line for line in introduction_lines(run) if line.startswith("memory.tape")]
    assert "optim.clip_by" in told
