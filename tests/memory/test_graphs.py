"""A step as a graph is a pure function of its buffers: replays of one recording give the bits of ordinary steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moefold.config.errors import RunFailure, UserError
from moefold.config.run import Config
from moefold.layout.axes import World, single_rank_world
from moefold.memory.graphs import StepGraph, capture_work, require_own_gpus
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import validation_loss
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run
from moefold.train.step import StepReport, take_next_step, train_step
from moefold.train.step_profile import profile_step
from tests.support.ranks import run_ranks
from tests.support.tape import TapeRecorder
from tests.train.test_fp8_runs import counting_corpus

WARM_UP = 2
STEPS = 6
SMALL = [
    *("--model.layers", "2", "--model.hidden", "32", "--model.moe.ffn", "32", "--model.moe.experts", "4"),
    *("--model.attention.heads", "2", "--model.attention.kv_heads", "1", "--model.attention.head_dim", "16"),
    *("--data.seq_len", "16", "--train.global_batch", "4", "--train.micro_batch", "2", "--optim.warmup", "4"),
    *("--train.device", "cpu", "--train.precision", "fp32", "--train.steps", str(STEPS), "--optim.lr", "5e-3"),
]


def small_config(words: str = "", preset: str = "tiny") -> Config:
    sizes = SMALL if preset == "tiny" else SMALL[SMALL.index("--data.seq_len") :]
    return resolve_recipe(preset, [*sizes, *words.split()], 1)


def assemble(config: Config) -> Run:
    config = replace(config, memory=replace(config.memory, tape=False))
    return assemble_run(config, single_rank_world("cpu"), Path("."), counting_corpus())


def as_graph(run: Run, warm_up: int = WARM_UP) -> TapeRecorder:
    """Let the run's steps be recorded."""
    recorder = TapeRecorder()
    run.graph = StepGraph(recorder, warm_up)
    return recorder


def figures(report: StepReport) -> list[object]:
    """All numbers of a report."""
    loads = report.loads
    counts = [loads.counts_LE.tolist(), loads.dropped_L.tolist(), loads.moved_L.tolist()]
    return [report.number, report.lr, list(report.read), *counts]


def state_of(run: Run) -> list[torch.Tensor]:
    state = [values[: len(values)] for *_, values in run.optimizer.state() if isinstance(values, torch.Tensor)]
    return [*run.model.state_dict().values(), *state]


def same_state(one: Run, two: Run) -> bool:
    pairs = zip(state_of(one), state_of(two), strict=True)
    return all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in pairs)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)  # what stands for weights stored in FP8 is no number


VARIANTS = {
    "plain": "",
    "documents": "--data.attend document",
    "jitter": "--model.moe.router.jitter 0.1",
    "sinks": "--model.attention.sinks true",
    "bias at the pace of the learning rate": "--model.moe.balance.bias_rate 0.01",
    "balance over the global batch": "--model.moe.balance.aux_loss 0.01 --model.moe.balance.aux_over global_batch",
    "balance over the batch before": "--model.moe.balance.aux_loss 0.01 --model.moe.balance.aux_over previous_batch",
    "capacity": "--model.moe.capacity.factor 1.0",
    "Muon with logit clipping": "--optim.rule muon --optim.qk_clip 0.01 --model.attention.qk_norm none",
    "stochastic rounding": "--train.precision bf16 --optim.moments bf16 --optim.rounding stochastic",
    "split main weights": "--train.precision bf16 --optim.main split",
    "recompute": "--memory.recompute norm,core,moe@0",
    "deferred weight gradients": "--pipeline.defer true",
    "FP8 blocks": "--precision.recipe fp8_block",
    "FP8 blocks, fused": "--precision.recipe fp8_block --model.moe.ffn 128",
    "FP8 rows": "--precision.recipe fp8_row",
    "MXFP8": "--precision.recipe mxfp8",
    "NVFP4": "--precision.recipe nvfp4 --precision.exclude_last 0",
    "delayed scales": "--precision.recipe fp8_row --precision.scaling delayed --precision.history 3",
    "weights stored in FP8": "--precision.recipe fp8_block --precision.storage fp8",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_give_the_bits_of_ordinary_steps(variant: str):
    config = small_config(VARIANTS[variant])
    plain, graphed = assemble(config), assemble(config)
    recorder = as_graph(graphed)
    assert steps_agree(plain, graphed, STEPS)
    assert recorder.recordings == 1
    assert same_state(plain, graphed)


def steps_agree(plain: Run, graphed: Run, steps: int) -> bool:
    return all(figures(take_next_step(plain)) == figures(take_next_step(graphed)) for _ in range(steps))


def test_latent_attention_shared_experts_and_tokens_ahead_replay_too():
    config = small_config(preset="deepseek-v3-tiny")
    plain, graphed = assemble(config), assemble(config)
    as_graph(graphed)
    assert steps_agree(plain, graphed, STEPS)
    assert same_state(plain, graphed)


@pytest.mark.parametrize("variant", ["plain", "FP8 blocks", "FP8 rows", "delayed scales"])
def test_validation_between_replays_reads_the_present_weights(variant: str):
    """FP8 copies of weights, and scales, that validation has made must not outlive the next replay, nor be part of the
    recording."""
    config = small_config(f"{VARIANTS[variant]} --train.validate_sequences 4")
    plain, graphed = assemble(config), assemble(config)
    recorder = as_graph(graphed)
    for _ in range(STEPS):
        assert steps_agree(plain, graphed, 1)
        assert validation_loss(plain) == validation_loss(graphed)
    assert recorder.recordings == 1


def test_observed_steps_run_between_replays():
    """Steps that record FP8 operands, and profiled ones, are looked into: they are no replays."""
    config = small_config("--precision.recipe fp8_block --observe.fp8_every 4")
    plain, graphed = assemble(config), assemble(config)
    recorder = as_graph(graphed)
    recorded: list[int] = []
    for number in range(1, STEPS + 1):
        mine, right = take_next_step(graphed), take_next_step(plain)
        assert figures(mine) == figures(right)
        if mine.operands is not None:
            recorded.append(number)
            assert torch.equal(mine.operands.sums_O5.read(), right.operands.sums_O5.read())  # pyright: ignore[reportOptionalMemberAccess]
    assert recorded == [4]
    report, _ = profile_step(graphed, partial(take_next_step, graphed))
    assert figures(report) == figures(take_next_step(plain))
    assert steps_agree(plain, graphed, 1)
    assert recorder.recordings == 1
    assert same_state(plain, graphed)


def test_gradients_are_those_of_the_last_step_also_behind_an_observed_one():
    plain, graphed = assemble(small_config()), assemble(small_config())
    as_graph(graphed)
    assert steps_agree(plain, graphed, WARM_UP + 2)
    for take in (partial(profile_step, graphed, partial(take_next_step, graphed)), partial(take_next_step, graphed)):
        take()
        take_next_step(plain)
        pairs = zip(plain.gradients.gradient_shares(), graphed.gradients.gradient_shares(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_a_replayed_step_that_is_not_finite_changes_nothing():
    graphed = assemble(small_config())
    as_graph(graphed)
    for _ in range(WARM_UP + 2):
        take_next_step(graphed)
    before = [x.clone() for x in state_of(graphed)]
    graphed.loss_scale.all_finite.fill_(False)  # as an earlier loss leaves it
    take_next_step(graphed)
    assert all(torch.equal(x, y) for x, y in zip(before, state_of(graphed), strict=True))


def test_batches_of_another_form_are_recorded_anew():
    plain, graphed = assemble(small_config()), assemble(small_config())
    recorder = as_graph(graphed)
    halves = [slice(0, 4), slice(0, 4), slice(0, 4), slice(0, 2), slice(0, 2), slice(0, 2), slice(0, 2)]
    for rows in halves:
        batches = [run.loader.next_batch() for run in (plain, graphed)]
        small = [replace(x, tokens_BS=x.tokens_BS[rows], labels_BS=x.labels_BS[rows]) for x in batches]
        assert figures(train_step(plain, small[0])) == figures(train_step(graphed, small[1]))
    assert recorder.recordings == 2
    assert same_state(plain, graphed)


def test_a_resumed_run_replays_from_where_it_was(tmp_path: Path):
    config = small_config()
    plain = assemble(config)
    saved = assemble_run(config, single_rank_world("cpu"), tmp_path, counting_corpus())
    as_graph(saved)
    with make_background_saver(saved, print) as saver:
        assert steps_agree(plain, saved, WARM_UP + 2)
        begin_checkpoint(saved, saver)
    resumed = assemble_run(config, single_rank_world("cpu"), tmp_path, counting_corpus())
    recorder = as_graph(resumed, 1)
    for _ in range(3):
        take_next_step(resumed)  # a graph of other weights, which resuming replaces
    resume_run(resumed, "auto", print)
    assert steps_agree(plain, resumed, 2)
    assert recorder.recordings == 2
    assert same_state(plain, resumed)


def test_a_tape_refuses_what_a_capture_refuses():
    """The tests above would not see a host that reads, if the tape let it."""
    x = torch.arange(3.0)
    reads = [x.sum().item, lambda: x.tolist(), x.nonzero, lambda: x[x > 1], lambda: torch.tensor([1.0])]
    for read in reads:
        with pytest.raises(AssertionError):
            TapeRecorder().record(read)
    result, replay = TapeRecorder().record(lambda: x + 1)
    replay()
    x += 1
    replay()
    assert result.tolist() == [2.0, 3.0, 4.0]


class SpoiltCapture:
    """A capture that its work has ended, as CUDA ends it at what no graph may have."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def fail_with(error: Exception) -> None:
    raise error


def test_a_failed_capture_tells_the_error_of_its_work():
    refused = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RunFailure, match=r"the step could not be captured: operation not permitted.*; see there"):
        capture_work(SpoiltCapture(), partial(fail_with, refused), "the step", "; see there")
    with pytest.raises(RunFailure, match="previous error"):
        capture_work(SpoiltCapture(), partial(torch.zeros, 1), "the step")
    with pytest.raises(torch.OutOfMemoryError, match="12 GiB"):
        capture_work(SpoiltCapture(), partial(fail_with, torch.OutOfMemoryError("12 GiB")), "the step")


def refusal_of(world: World) -> str:
    try:
        require_own_gpus(world)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_meet_over_gloo_have_no_graph_of_a_step():
    assert refusal_of(single_rank_world()) == ""
    for refusal in run_ranks(refusal_of, 2):
        assert "2 ranks share GPUs, over gloo, whose messages cannot be captured" in refusal
