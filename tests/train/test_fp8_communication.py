"""Whole runs that send tokens, gradients and tensor-parallel sums in FP8: near plain ones, agreed over ranks, the same
with recompute, pipelines and paired slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.layout.axes import World, create_world
from moefold.layout.declare import declared_parameters
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks
from tests.train.test_fp8_runs import SMALL, counting_corpus

WORDS = [
    *SMALL,
    *("--model.hidden", "128", "--model.attention.kv_heads", "2", "--model.moe.experts", "4", "--optim.lr", "1e-3"),
    *("--data.seq_len", "32", "--train.global_batch", "8", "--train.micro_batch", "1", "--model.moe.shared_ffn", "64"),
]
TOKENS = ["--precision.dispatch", "fp8", "--precision.combine_gradient", "e5m2"]
SUMS = ["--precision.tp_sums", "fp8", "--precision.tp_sum_gradients", "fp8"]
GRADIENTS = ["--optim.gradient_reduce", "fp8"]
STEPS = 2
NEAR = 5e-3  # of the loss


def train(world: World, words: list[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and this rank's parts of the weights."""
    config = resolve_recipe("tiny", [*WORDS, *words], world.size)
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    run = assemble_run(config, here, Path("."), counting_corpus())
    losses = [take_next_step(run).loss for _ in range(STEPS)]
    parts: dict[str, torch.Tensor] = {}
    if config.shard.mode == "zero3":  # nothing is whole
        return losses, parts
    run.parameters.await_all_buckets()
    for parameter in declared_parameters(run.model):
        parts[f"{parameter.name} {parameter.part}"] = parameter.tensor.detach().clone()
    return losses, parts


def train_all(world: World, cases: list[list[str]]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    return [train(world, words) for words in cases]


def results_of(ranks: int, *cases: list[str]) -> list[list[float]]:
    """The losses of each case, once all ranks are seen to agree on them and on the weights that they share."""
    by_rank = run_ranks(train_all, ranks, list(cases))
    found: list[list[float]] = []
    for case in zip(*by_rank, strict=True):
        weights: dict[str, torch.Tensor] = {}
        for losses, parts in case:
            assert losses == case[0][0]
            for name, part in parts.items():
                assert torch.equal(weights.setdefault(name, part), part), name
        found.append(case[0][0])
    return found


def assert_near(losses: list[float], right: list[float]):
    assert losses != right, "something is rounded"
    assert losses == pytest.approx(right, rel=NEAR)


@pytest.mark.extended
def test_eight_ranks_agree_and_learn_as_without_fp8():
    layout = ["--parallel.tp", "2", "--parallel.ep", "4", "--parallel.dispatcher", "dedup"]
    plain, tokens, sums, both = results_of(
        8, layout, [*layout, *TOKENS], [*layout, *SUMS], [*layout, *TOKENS, *SUMS, "--precision.recipe", "fp8_block"]
    )
    assert_near(tokens, plain)
    assert_near(sums, plain)
    assert_near(both, plain)


@pytest.mark.extended
def test_pipelines_paired_slots_and_recompute_change_no_bit():
    base = ["--parallel.ep", "2", "--parallel.dispatcher", "all_to_all", *TOKENS]
    pipeline = [*base, "--parallel.pp", "2", "--train.global_batch", "4"]
    pair = ["--pipeline.pair", "true"]
    alone, again, paired, paired_again, in_step, plain = results_of(
        4,
        pipeline,
        [*pipeline, "--memory.recompute", "moe"],
        [*pipeline, *pair],
        [*pipeline, *pair, "--memory.recompute", "experts"],
        [*pipeline, *pair, "--pipeline.pairs", "alike"],
        [word for word in pipeline if word not in TOKENS],
    )
    assert alone == again == paired == paired_again == in_step
    assert_near(alone, plain)


def losses_and_bytes(world: World, cases: list[list[str]]) -> list[tuple[list[float], int]]:
    """Of each case the losses, and the bytes of gradients that this rank sends to those that update their weights."""
    found: list[tuple[list[float], int]] = []
    for words in cases:
        with counted_bytes_sent() as sent:
            losses, _ = train(world, words)
        found.append((losses, sum(count for (what, _), count in sent.items() if what == "reduce")))
    return found


@pytest.mark.extended
def test_gradients_in_half_of_the_bytes_learn_as_without_fp8():
    """Shares of both modes begin at multiples of a block, so that the same gradients have a scale in common."""
    layout = ["--parallel.ep", "2", "--parallel.tp", "2", "--train.global_batch", "2"]
    full = [*layout, "--shard.mode", "zero3"]
    found = run_ranks(
        losses_and_bytes, 4, [[*layout, "--optim.gradient_reduce", "bf16"], [*layout, *GRADIENTS], [*full, *GRADIENTS]]
    )
    for (plain, bf16), (shared, shared_bytes), (sharded, sharded_bytes) in found:
        assert_near(shared, plain)
        assert sharded == shared == found[0][1][0]
        assert 0 < max(shared_bytes, sharded_bytes) <= 0.53 * bf16
