"""Steps of the model as graphs of their own: replays give the bits of ordinary steps, each microbatch in flight has
memory of its own, and what is captured is bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.anatomy.step_specs import StepSpec
from moefold.layout.axes import Axis, World
from moefold.memory.static_graphs import StaticGraphs, attach_static_graphs
from moefold.model.steps import Carry, Step, run_step_sequence
from moefold.model.token_layout import TokenShard
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run, bind_static_graphs
from moefold.train.evaluate import validation_loss
from moefold.train.share_out import SharedOut
from moefold.train.step import take_next_step, train_step
from tests.memory.test_graphs import SMALL, assemble, figures, same_state, small_config, steps_agree
from tests.support.ranks import run_ranks
from tests.support.tape import TapeRecorder
from tests.train.test_fp8_runs import counting_corpus

STEPS = 4
PASSES = 3  # a forward, the backward that begins sums, the backward that adds to them


def with_static_graphs(run: Run, warm_up: int = 1) -> TapeRecorder:
    """Let the run's static steps be recorded, as assembly does on a GPU."""
    recorder = TapeRecorder()
    graphs = StaticGraphs(recorder, run.world.device, warm_up)
    attach_static_graphs(run.model, graphs)
    bind_static_graphs(graphs, SharedOut(run.gradients.buckets, run.gradients, run.parameters))
    run.static_graphs = graphs
    return recorder


def slots(run: Run) -> int:
    assert run.static_graphs is not None
    return run.static_graphs.slot_count


VARIANTS = {  # and the number of captured runs of steps, of two layers; that of attention's weight gradients that wait
    "documents, jitter, biases": (
        "--data.attend document --model.moe.router.jitter 0.1 --model.moe.balance.bias_rate 0.01",
        2,
        0,
    ),
    "balance over the global batch": (
        "--model.moe.balance.aux_loss 0.01 --model.moe.balance.aux_over global_batch --model.moe.capacity.factor 1.0",
        2,
        0,
    ),
    "deferred weight gradients": ("--pipeline.defer true", 2, 2),
    "FP8 blocks": ("--precision.recipe fp8_block --memory.recompute norm", 2, 0),
    "FP8 rows, scales of the steps before": (
        "--precision.recipe fp8_row --precision.scaling delayed --precision.history 3",
        2,
        0,
    ),
    "MXFP8": ("--precision.recipe mxfp8", 2, 0),
    "NVFP4, deferred": ("--precision.recipe nvfp4 --precision.exclude_last 0 --pipeline.defer true", 2, 2),
    "bf16": ("--train.precision bf16 --optim.clip_by unit --optim.when backward", 2, 0),
    "recompute": ("--memory.recompute moe@0,dispatch@1", 2, 0),
    "recompute inside": ("--memory.recompute norm,core,experts", 2, 0),
    "a layer recomputed, a stash": ("--memory.recompute layer@0 --memory.stash stack --memory.stash_gib 0.01", 1, 0),
    "offload": ("--memory.offload experts --memory.offload_least 1", 2, 0),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_give_the_bits_of_ordinary_steps(variant: str):
    words, captured, waiting = VARIANTS[variant]
    plain, graphed = assemble(small_config(words)), assemble(small_config(words))
    recorder = with_static_graphs(graphed)
    assert steps_agree(plain, graphed, STEPS)
    assert slots(graphed) == captured
    assert recorder.recordings == captured * PASSES + waiting * 2
    assert same_state(plain, graphed)


@pytest.mark.parametrize("recomputed", ["", " --memory.recompute norm,up,mlp,shared"])
def test_latent_attention_dense_layers_shared_experts_and_validation_between_replays(recomputed: str):
    config = small_config(f"--train.validate_sequences 2{recomputed}", "deepseek-v3-tiny")
    plain, graphed = assemble(config), assemble(config)
    with_static_graphs(graphed)
    for _ in range(STEPS):
        assert steps_agree(plain, graphed, 1)
        assert validation_loss(plain) == validation_loss(graphed)
    names = {step.steps.name for step in graphed.static_graphs.captured if step.slots}  # pyright: ignore[reportOptionalMemberAccess]
    assert names == {"attend+route", "attend+mlp", "shared"}
    assert same_state(plain, graphed)


def test_what_a_slot_keeps_falls_where_regions_inside_are_recomputed():
    kept: list[int] = []
    for words in ("", "--memory.recompute norm,core"):
        run = assemble(small_config(words))
        with_static_graphs(run)
        for _ in range(2):
            take_next_step(run)
        assert run.static_graphs is not None
        attention = run.static_graphs.captured[0].slots[0]
        assert bool(attention.rebuilt) == bool(words)
        kept.append(len(attention.kept))
    assert kept[1] < kept[0]


def test_batches_of_another_form_are_captured_anew():
    plain, graphed = assemble(small_config()), assemble(small_config())
    recorder = with_static_graphs(graphed)
    recordings: list[int] = []
    for tokens in (16, 16, 8, 8, 8):
        batches = [run.loader.next_batch() for run in (plain, graphed)]
        cut = []
        for batch in batches:
            tokens_BS = batch.tokens_BS[:, :tokens]
            labels_BS = batch.labels_BS[:, :tokens]
            cut.append(replace(batch, tokens_BS=tokens_BS, labels_BS=labels_BS))
        assert figures(train_step(plain, cut[0])) == figures(train_step(graphed, cut[1]))
        recordings.append(recorder.recordings)
    assert recordings == [0, 6, 6, 12, 12]
    assert same_state(plain, graphed)


LAYOUTS = {  # words, and for each rank the microbatches in flight
    2: [
        ("--parallel.ep 2 --model.moe.shared_ffn 32", [1, 1]),
        ("--parallel.ep 2 --pipeline.pair true --pipeline.fill false --train.micro_batch 1", [2, 2]),
        ("--parallel.ep 2 --pipeline.pair true --train.micro_batch 1", [2, 2]),
    ],
    4: [
        ("--parallel.ep 2 --parallel.pp 2 --train.micro_batch 1", [2, 2, 1, 1]),
        ("--parallel.ep 2 --parallel.pp 2 --train.micro_batch 1 --pipeline.schedule zb_h1", [2, 2, 2, 2]),
    ],
}
Comparison = tuple[bool, int, int, int]  # whether bits are equal, the captured steps, their slots, their pools


def compare_runs(world: World, layouts: list[str]) -> list[Comparison]:
    torch.set_num_threads(1)
    return [compare_layout(world, words) for words in layouts]


def compare_layout(world: World, words: str) -> Comparison:
    config = resolve_recipe("tiny", [*SMALL, "--train.global_batch", "8", *words.split()], world.size)
    runs = [assemble_run(config, world, Path("."), counting_corpus()) for _ in range(2)]
    plain, graphed = runs
    with_static_graphs(graphed)
    agree = all(figures(take_next_step(plain)) == figures(take_next_step(graphed)) for _ in range(STEPS))
    assert graphed.static_graphs is not None
    steps = len(graphed.static_graphs.captured)
    pools = len(graphed.static_graphs.memory.pools)
    return agree and same_state(plain, graphed), steps, slots(graphed), pools


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_microbatch_in_flight_has_a_slot_of_each_step_and_a_pool(ranks: int):
    layouts = LAYOUTS[ranks]
    words = [words for words, _ in layouts]
    by_rank = run_ranks(compare_runs, ranks, words, ep=2, pp=ranks // 2)
    for rank, compared in enumerate(by_rank):
        for (layout, in_flight), (agree, steps, made, pools) in zip(layouts, compared, strict=True):
            assert agree, (layout, rank)
            assert made == steps * in_flight[rank], (layout, rank)
            assert pools == in_flight[rank], (layout, rank)


def toy_steps(graphs: StaticGraphs) -> tuple[list[Step], Carry]:
    """Two captured steps. Backward of the first one does not read its input; that of the second one does."""
    attend = StepSpec("attend", "compute", True, "")
    first = Step(attend, lambda carry: carry | {"stream": carry["stream"] + 1}, 0)
    second = Step(attend, lambda carry: carry | {"stream": carry["stream"] ** 2}, 1)
    shard = TokenShard(1, 4, Axis("cp"), Axis("tp"), torch.device("cpu"))
    carry = {"token_shard": shard, "stream": torch.ones(4, 8, requires_grad=True)}
    return graphs.capture_steps([first, second]), carry


def test_a_slot_that_is_made_anew_leaves_no_addresses():
    """Memory of the first layer's input is shared, that of the second one is not."""
    recorder = TapeRecorder()
    graphs = StaticGraphs(recorder, torch.device("cpu"), warm_up_steps=0)
    steps, carry = toy_steps(graphs)
    graphs.take_step(lambda: [step.run(carry) for step in steps])
    assert recorder.recordings == 3
    made = [slot for step in graphs.captured for slot in step.slots]
    assert graphs.memory.standing == made[0].standing | made[1].standing
    assert len(graphs.memory.pools) == len(made) == 2


def test_no_microbatch_begins_in_memory_that_weight_gradients_wait_in():
    graphs = StaticGraphs(TapeRecorder(), torch.device("cpu"), warm_up_steps=0)
    steps, carry = toy_steps(graphs)

    def forward_and_backward() -> int:
        run_step_sequence(steps, carry)["stream"].sum().backward()
        return graphs.slot_count

    def beside_waiting_gradients() -> int:
        forward_and_backward()
        graphs.captured[0].slots[0].pool.waiting += 1
        return forward_and_backward()

    assert graphs.take_step(forward_and_backward) == 2
    assert graphs.take_step(beside_waiting_gradients) == 4
    assert graphs.take_step(forward_and_backward) == 4
