"""Fully sharded runs: published weights in and out by shares, validation and samples, gathers beside compute."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.export import export_hf_weights
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.comm import byte_counters, grad_reduce, two_levels
from moefold.config.run import Config, DataConfig, LoraConfig, MemoryConfig, ParallelConfig, ShardConfig, TrainConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.model.steps import PassKey, PassKind, Step
from moefold.model.transformer import Transformer
from moefold.observe.printer import print_nothing
from moefold.observe.trace import StepTracer, TraceEvent
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.evaluate import sample_text, validation_loss
from moefold.train.from_hf import starting_weights
from moefold.train.parity import random_corpus, shrink_config, single_rank_config
from moefold.train.step import take_next_step
from tests.support.hf_models import CASES, make, save
from tests.support.ranks import run_ranks
from tests.support.resident_weights import assemble_watched_run


def config_of(folder: Path, shard: ShardConfig, parallel: ParallelConfig) -> Config:
    return Config(
        model=describe_model(open_model_folder(folder)).model,
        data=DataConfig(seq_len=16, tokenizer="byte"),
        train=TrainConfig(precision="fp64", device="cpu", global_batch=8, micro_batch=1, validate_sequences=8),
        shard=shard,
        parallel=parallel,
    )


def fold(world: World, config: Config) -> World:
    if world.size == 1:
        return world
    return create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)


def train_from_folder(world: World, path: str, config: Config) -> tuple[list[float], str, int, set[str]]:
    """Losses before, in and after a step from a folder's weights; what was held beyond shares and two units, by how
    many counts beside steps; and the names of exported weights that are those of the folder."""
    folder = Path(path)
    here = fold(world, config)
    fill = starting_weights(folder, config, here, print_nothing)
    run, weights = assemble_watched_run(config, here, random_corpus(config), fill)
    described = describe_model(open_model_folder(folder))
    before = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    exported = export_hf_weights(run.model, described.model, here, described.family.kind, torch.float32)
    counted = weights.counted_export(exported)
    same = {name for name, tensor in counted if torch.equal(tensor, before[name])}
    losses = [validation_loss(run)]
    with run.executor.observed_by(weights):
        losses.append(take_next_step(run).loss)
    losses.append(validation_loss(run))
    return losses, weights.excess(config), weights.counts, same


@pytest.mark.extended
def test_published_weights_are_read_and_given_back_by_shares(tmp_path: Path):
    """Stacks of experts, a tied head, and layers that look ahead; a rank reads no more than its share. On eight ranks
    it holds at most its share and two units while each tensor is read, and while each is exported."""
    kind, options = CASES["deepseek v3"]
    folder = save(make(kind, **{**options, "num_hidden_layers": 4, "vocab_size": 256}), tmp_path / "hf")
    alone = config_of(folder, ShardConfig(), ParallelConfig())
    expected, _, _, _ = train_from_folder(single_rank_world(), str(folder), alone)
    sharded = config_of(folder, ShardConfig("zero3"), ParallelConfig(ep=2))
    names = load_file(folder / "model.safetensors").keys()
    for losses, excess, counts, same in run_ranks(train_from_folder, 8, str(folder), sharded):
        assert not excess
        assert counts > 2 * len(names)
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
        assert same == names


def adapt_folder(world: World, path: str, config: Config) -> list[float]:
    """Losses before, in and after a step of adapters on a folder's weights."""
    here = fold(world, config)
    fill = starting_weights(Path(path), config, here, print_nothing)
    run = assemble_run(config, here, Path("."), random_corpus(config), fill, draw_second_factors)
    losses = [validation_loss(run), take_next_step(run).loss]
    return [*losses, validation_loss(run)]


def draw_second_factors(model: Transformer) -> None:
    """Give adapters another start than their own, by which B is zero."""
    for parameter in declared_parameters(model):
        if parameter.name.endswith("lora.b"):
            parameter.tensor.data.fill_(0.01)


@pytest.mark.extended
@pytest.mark.parametrize("keys", [{}, {"base": "nf4"}, {"dora": True}], ids=["plain", "in blocks", "magnitudes"])
def test_adapters_start_from_given_ones_on_published_weights(keys: dict[str, Any], tmp_path: Path):
    kind, options = CASES["qwen3"]
    folder = save(make(kind, **{**options, "vocab_size": 256}), tmp_path / "hf")
    alone = replace(config_of(folder, ShardConfig(), ParallelConfig()), lora=LoraConfig(rank=2, **keys))
    expected = adapt_folder(single_rank_world(), str(folder), alone)
    sharded = replace(alone, shard=ShardConfig("zero3"))
    for losses in run_ranks(adapt_folder, 2, str(folder), sharded):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)


def tiny(shard: ShardConfig, world: int, **changes: Any) -> Config:
    config = replace(PRESETS["tiny"](), shard=shard, **changes)
    small = shrink_config(replace(config, train=replace(config.train, precision="fp64")), world)
    return replace(small, train=replace(small.train, sample_tokens=3))


def watched_step(world: World, config: Config) -> tuple[list[float], str]:
    """Losses in and after a step, and what was held beyond shares and two units."""
    run, weights = assemble_watched_run(config, fold(world, config), random_corpus(config))
    with run.executor.observed_by(weights):
        losses = [take_next_step(run).loss]
    return [*losses, validation_loss(run)], weights.excess(config)


FROZEN = ("embedding.*: frozen", "blocks.0.moe.experts.*: frozen", "*.attention.*: frozen")


def test_of_frozen_weights_a_rank_holds_its_share():
    optim = replace(PRESETS["tiny"]().optim, groups=FROZEN)
    config = tiny(ShardConfig("zero3"), 4, optim=optim, parallel=ParallelConfig(ep=2))
    expected, _ = watched_step(single_rank_world(), single_rank_config(config))
    for losses, excess in run_ranks(watched_step, 4, config):
        assert not excess
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)


def sample(world: World, config: Config) -> tuple[str, float]:
    run = assemble_run(config, fold(world, config), Path("."), corpus=random_corpus(config))
    take_next_step(run)
    return sample_text(run, "ab"), validation_loss(run)


@pytest.mark.extended
def test_validation_and_samples_are_those_of_one_rank():
    text, loss = sample(single_rank_world(), replace(tiny(ShardConfig(), 4), shard=ShardConfig()))
    for sharded_text, sharded_loss in run_ranks(sample, 4, tiny(ShardConfig("zero3"), 4)):
        assert sharded_text == text
        assert abs(sharded_loss - loss) < 1e-9


COMPUTE, EXCHANGE = 0.02, 0.01  # seconds of a step with weights, and of a gather or reduction


class SlowWork:
    """A gather or reduction that takes its time from when it was begun."""

    def __init__(self, work: Any):
        self.work = work
        self.end = time.time() + EXCHANGE

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.end - time.time()))


class SlowSteps:
    """An observer that makes attention slow."""

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if step.spec.name in ("attend", "predict"):
            time.sleep(COMPUTE)

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None: ...


def begin_slowly(begin: Any, *args: Any, **options: Any) -> SlowWork:
    return SlowWork(begin(*args, **options))


def traced_step(world: World, config: Config) -> tuple[list[TraceEvent], int]:
    """The spans of a step's steps, gathers and reductions, and the bytes that gathers sent."""
    gather = partial(begin_slowly, two_levels.DIST_ALL_GATHER)
    reduce = partial(begin_slowly, grad_reduce.DIST_REDUCE_SCATTER)
    run = assemble_run(config, fold(world, config), Path("."), corpus=random_corpus(config))
    with (
        mock.patch.object(two_levels, "DIST_ALL_GATHER", gather),
        mock.patch.object(grad_reduce, "DIST_REDUCE_SCATTER", reduce),
    ):
        take_next_step(run)
        run.executor.spans.start_recording()
        tracer = StepTracer(run.executor.spans)
        with run.executor.observed_by(tracer, SlowSteps()), byte_counters.counted_bytes_sent() as sent:
            take_next_step(run)
    return run.executor.spans.events, sum(count for (what, *_), count in sent.items() if what == "unit")


def beside_slow_steps(events: list[TraceEvent], lane: str) -> list[tuple[str, str]]:
    """The exchanges of a lane in order: unit, and the first slow step that begins meanwhile; empty if none does."""
    slow = [event for event in events if event.name.startswith(("attend", "predict"))]
    found: list[tuple[str, str]] = []
    for exchange in sorted(events, key=lambda event: event.start):
        if exchange.lane == lane:
            meanwhile = [step.name for step in slow if exchange.start < step.start < exchange.end]
            found.append((exchange.name, meanwhile[0] if meanwhile else ""))
    return found


def test_units_are_gathered_while_the_unit_before_computes():
    """Of one microbatch: embedding, two blocks and head forward; backward the head is there, and the embedding needs
    no compute before it."""
    config = tiny(ShardConfig("zero3"), 2)
    config = replace(config, train=replace(config.train, global_batch=2))
    for events, _ in run_ranks(traced_step, 2, config):
        gathers = beside_slow_steps(events, "gathers")
        names = [unit for unit, _ in gathers]
        assert names == ["embedding", "blocks.0", "blocks.1", "head", "blocks.0", "embedding"], names
        alone = [unit for unit, step in gathers if not step]
        assert len(alone) <= 2, f"{alone} of {names} beside no compute"


def test_gradients_of_a_unit_are_reduced_while_the_next_one_is_in_backward():
    """Of two microbatches: those of the first block travel beside the next forward, those of the embedding leave when
    backward comes to another unit. Behind the last backward nothing computes."""
    config = tiny(ShardConfig("zero3"), 2)
    config = replace(config, train=replace(config.train, global_batch=4))
    expected = [
        *(("head", "attend D0.0"), ("blocks.1", "attend D0.0"), ("blocks.0", "attend F0.1")),
        *(("embedding", "predict D0.1"), ("head", "attend D0.1"), ("blocks.1", "attend D0.1")),
        *(("blocks.0", ""), ("embedding", "")),
    ]
    for events, _ in run_ranks(traced_step, 2, config):
        buckets = beside_slow_steps(events, "reductions")  # several of a unit
        assert list(dict.fromkeys(buckets)) == expected


def test_recompute_gathers_nothing_twice():
    config = tiny(ShardConfig("zero3"), 2)
    again = replace(config, memory=MemoryConfig(("layer",)))
    (_, plain), _ = run_ranks(traced_step, 2, config)
    (_, recomputing), _ = run_ranks(traced_step, 2, again)
    assert recomputing == plain


NODE = 4  # ranks of each of two nodes
INSIDE_AND_ACROSS = {"dense": (4, 2), "expert": (2, 2)}  # replicas of a node, and nodes, with ep 2
GATHERS = {"embedding": 2, "blocks.0": 2, "blocks.1": 1, "head": 1}  # of a microbatch, as above


def bytes_by_level(world: World, config: Config) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Bytes that the second step's sums and gathers send inside nodes and across them, and those of the formulas of
    MegaScale-MoE, A.1: of P bytes P (n-1)/n inside a node and P/n (d-1)/d across, for n replicas on each of d nodes."""
    here = create_world(world.rank, world.size, world.device, config.parallel, NODE, shard=config.shard)
    run = assemble_run(config, here, Path("."), random_corpus(config))
    take_next_step(run)
    run.parameters.await_all_buckets()
    with byte_counters.counted_bytes_sent() as counted:
        take_next_step(run)
        run.parameters.await_all_buckets()
    sent, formulas = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (what, axis), count in counted.items():
        if axis.startswith("gradients of"):
            sent[what, axis.rpartition(" ")[2]] += count
    for bucket in run.gradients.buckets:
        n, d = INSIDE_AND_ACROSS[bucket.placement.grid]
        weights = len(bucket.weights) * bucket.weights.itemsize
        gathered = {"unit": weights * GATHERS[bucket.unit]} if bucket.unit else {"publish": weights}
        for what, whole in {"reduce": bucket.sums.nbytes, **gathered}.items():
            formulas[what, "inside"] += whole * (n - 1) // n
            formulas[what, "nodes"] += whole // n * (d - 1) // d
    return sent, formulas


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_a_step_sends_the_bytes_of_the_formulas_inside_nodes_and_across_them(mode: Any):
    config = tiny(ShardConfig(mode, sync="hierarchical"), 8, parallel=ParallelConfig(ep=2))
    config = replace(config, train=replace(config.train, global_batch=8))
    for sent, formulas in run_ranks(bytes_by_level, 8, config):
        assert sent == formulas
        assert len(formulas) == 4
