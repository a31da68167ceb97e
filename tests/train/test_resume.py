"""Twenty random pairs of layouts: what one saves, the other takes up exactly, and goes on as the first would have."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from moefold.checkpoint.format.ledger import compare_ledgers
from moefold.checkpoint.format.retention import step_folder_name
from moefold.checkpoint.format.verify import OpenedCheckpoint, open_checkpoint
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.logical_tensors import restore_rng_state, rng_state_tensors
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.config.run import (
    AttentionConfig,
    BalanceConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    ObserveConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    RouterConfig,
    ShardConfig,
    TrainConfig,
)
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import random_corpus
from moefold.train.resume import (
    begin_checkpoint,
    make_background_saver,
    resume_run,
    window_of_rank,
    with_common_window,
)
from moefold.train.step import train_step
from tests.support.ranks import run_ranks

RANKS, PAIRS, LAYOUTS, STEPS = 4, 20, 6, 5
MODEL = ModelConfig(
    layers=2,
    hidden=32,
    vocab=256,
    dense_ffn=32,
    mtp=1,
    attention=AttentionConfig(heads=4, kv_heads=4, head_dim=8, qk_norm="head", qkv_bias=True),
    moe=MoeConfig(
        experts=8,
        top_k=2,
        ffn=16,
        shared_ffn=16,
        dense_layers=1,
        router=RouterConfig(score="sigmoid"),
        balance=BalanceConfig(bias_rate=0.01),
    ),
)
START = Config(
    name="any",
    model=MODEL,
    data=DataConfig(seq_len=16),
    train=TrainConfig(device="cpu", precision="fp32", global_batch=4, micro_batch=1, steps=1000),
    optim=OptimConfig(warmup=0, lr=1e-2, eps=1e-3),
    observe=ObserveConfig(tensorboard=False),
)
AXES = ("tp", "cp", "pp", "ep", "etp")


def legal_layouts() -> list[Config]:
    """Every way to lay the model out on all ranks."""
    found = []
    for *sizes, vpp in product(*([(1, 2, 4)] * len(AXES)), (1, 2)):
        degrees: dict[str, Any] = dict(zip(AXES, sizes, strict=True))
        pipeline = PipelineConfig(vpp=vpp, schedule="interleaved" if vpp > 1 else "1f1b")
        config = replace(START, parallel=ParallelConfig(**degrees), pipeline=pipeline)
        if not broken_rules(ConfigOnRanks(config, RANKS)):
            found.append(config)
    return found


def chosen_layouts(seed: int) -> tuple[list[Config], list[int]]:
    """Some layouts that differ much, and a random way among them whose every step is another pair."""
    chance = random.Random(seed)
    layouts = chance.sample(legal_layouts(), LAYOUTS)
    way = [0]
    while len(way) <= PAIRS:
        used = set(pairwise(way))
        way.append(chance.choice([n for n in range(LAYOUTS) if n != way[-1] and (way[-1], n) not in used]))
    return layouts, way


def write(run: Run, saver: BackgroundSaver) -> OpenedCheckpoint:
    begin_checkpoint(run, saver)
    saver.wait_until_written()
    return open_checkpoint(run.out / "checkpoints" / step_folder_name(run.step))


def losses(run: Run, steps: int = STEPS) -> list[tuple[float, float]]:
    reports = [train_step(run, run.loader.next_batch()) for _ in range(steps)]
    return [(report.loss, report.mtp_loss) for report in reports]


def wander(world: World, folder: str, layouts: list[Config], way: list[int]) -> list[tuple[float, list[str]]]:
    """The state of the first layout's run goes from layout to layout. At each: the largest difference of the losses
    that follow from those of the first, and the tensors that are not exactly what the first had."""
    runs: list[Run] = []
    for number, config in enumerate(layouts):
        shard = config.shard
        here = create_world(world.rank, world.size, world.device, config.parallel, node_size=2, shard=shard)
        runs.append(assemble_run(config, here, Path(folder) / str(number), corpus=random_corpus(config)))
    savers = [make_background_saver(run, str) for run in runs]
    first = runs[way[0]]
    losses(first)  # so that there is a state
    start = saved = write(first, savers[way[0]])
    expected, found = losses(first), []
    for n in way[1:]:
        resume_run(runs[n], str(saved.path), str)
        saved = write(runs[n], savers[n])
        wrong = compare_ledgers(start.ledger, saved.ledger)
        assert (saved.state["step"], saved.state["consumed"]) == (start.state["step"], start.state["consumed"])
        pairs = zip(expected, losses(runs[n]), strict=True)
        found.append((max(abs(x - y) for pair in pairs for x, y in zip(*pair, strict=True)), [d.text for d in wrong]))
    return found


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.alone  # eight ranks for minutes: beside eight others they would pass the limit of a test
def test_any_layout_takes_up_what_any_other_saved(tmp_path: Path):
    layouts, way = chosen_layouts(seed=7)
    assert len(set(pairwise(way))) == PAIRS
    found = run_ranks(wander, RANKS, str(tmp_path), layouts, way)[0]
    for (a, b), (worst, wrong) in zip(pairwise(way), found, strict=True):
        pair = (
            f"from {layouts[a].parallel} {layouts[a].pipeline.vpp} to {layouts[b].parallel} {layouts[b].pipeline.vpp}"
        )
        assert not wrong, f"{pair}: {wrong}"
        assert worst <= 1e-6, f"{pair}: losses differ by {worst:.1e}"


WINDOW_GIB = 30_000 / 2**30  # less than any rank's file, and than the largest tensor


def save_both_ways_and_resume(world: World, folder: str, config: Config) -> tuple[bool, bool, bool]:
    """Whether the run's checkpoint went through a window in pieces, has the bytes of one by an image, and is resumed to
    the same losses."""
    here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    through_window = replace(config, checkpoint=CheckpointConfig(host_gib=WINDOW_GIB))
    image = assemble_run(config, here, Path(folder) / "image", corpus=random_corpus(config))
    window = assemble_run(through_window, here, Path(folder) / "window", corpus=random_corpus(config))
    again = assemble_run(through_window, here, Path(folder) / "again", corpus=random_corpus(config))
    losses(image, 2)
    rng_state = rng_state_tensors(here)
    whole = write(image, make_background_saver(image, str))
    resume_run(window, str(whole.path), str)
    restore_rng_state(rng_state, here)
    saver = make_background_saver(window, str)
    begin_checkpoint(window, saver)
    expected = losses(window, 2)  # its updates wait
    saver.wait_until_written()
    saved = open_checkpoint(window.out / "checkpoints" / step_folder_name(2))
    resume_run(again, str(saved.path), str)
    is_same = values_of_folder(Path(str(whole.path))) == values_of_folder(Path(str(saved.path)))
    return not saver.holds_file, is_same, losses(again, 2) == expected


def values_of_folder(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint but those that have its configuration."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix == ".safetensors"} | {
        "ledger": (folder / "ledger.json").read_bytes()
    }


LEAN = replace(START, optim=replace(START.optim, moments="int8"))


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, replace(LEAN, optim=replace(LEAN.optim, states="host"))),
        (2, replace(LEAN, shard=ShardConfig(mode="zero3"), parallel=ParallelConfig(ep=2))),
    ],
    ids=["int8 moments", "zero3 and int8 moments"],
)
def test_a_checkpoint_through_a_window_is_the_same_and_resumes_to_the_bit(ranks: int, config: Config, tmp_path: Path):
    for in_pieces, is_same, resumes in run_ranks(save_both_ways_and_resume, ranks, str(tmp_path), config):
        assert in_pieces
        assert is_same
        assert resumes


def window_of_unlike_machines(world: World, folder: str) -> int | None:
    """The window of a rank where the machine of rank 1 alone has too little memory for whole files, of which too little
    for one byte a rank."""
    own = replace(START, checkpoint=CheckpointConfig(host_gib=world.rank / 2**40))
    config = with_common_window(own, world)
    return window_of_rank(assemble_run(config, world, Path(folder), random_corpus(config)))


def test_machines_that_are_unlike_have_one_window(tmp_path: Path):
    """Ranks with other settings than rank 0's are refused."""
    assert run_ranks(window_of_unlike_machines, 2, str(tmp_path)) == [1, 1]


@pytest.mark.extended
def test_experts_and_mlps_without_a_gate_are_taken_up_by_another_layout(tmp_path: Path):
    moe = replace(MODEL.moe, activation="relu2", biases=True)
    start = replace(START, model=replace(MODEL, dense_activation="gelu", moe=moe))
    layouts = [replace(start, parallel=each) for each in (ParallelConfig(tp=2, ep=4), ParallelConfig(etp=2, pp=2))]
    for worst, wrong in run_ranks(wander, RANKS, str(tmp_path), layouts, [0, 1, 0])[0]:
        assert not wrong
        assert worst <= 1e-6


@pytest.mark.extended
def test_muon_groups_and_frozen_parameters_are_taken_up_by_another_layout(tmp_path: Path):
    groups = ("*.router.weight: rule=adamw", "blocks.0.attention.*: frozen", "*.experts.*: lr=0.5")
    optim = replace(START.optim, rule="muon", groups=groups)
    start = replace(START, optim=optim, train=replace(START.train, precision="fp64"))
    parallels = (
        ParallelConfig(tp=2, ep=4),
        ParallelConfig(etp=2, pp=2),
        ParallelConfig(cp=2, context="ring", ep=2, etp=2),
        ParallelConfig(),
    )
    layouts = [replace(start, parallel=each) for each in parallels]
    for worst, wrong in run_ranks(wander, RANKS, str(tmp_path), layouts, [0, 1, 2, 3, 0])[0]:
        assert not wrong
        assert worst <= 1e-9


SHARDINGS = [
    (ShardConfig("zero3"), ParallelConfig(ep=2)),
    (ShardConfig(), ParallelConfig(tp=2)),
    (ShardConfig("zero3", 2), ParallelConfig(etp=2)),
    (ShardConfig("zero3"), ParallelConfig(pp=2)),
    (ShardConfig("zero1", 2), ParallelConfig(cp=2, context="ring")),
    (ShardConfig("zero1", sync="hierarchical"), ParallelConfig(ep=2)),
]


@pytest.mark.extended
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_any_sharding_takes_up_what_another_saved(rule: str, tmp_path: Path):
    start = replace(START, optim=replace(START.optim, rule=rule), train=replace(START.train, precision="fp64"))
    layouts = [replace(start, shard=shard, parallel=parallel) for shard, parallel in SHARDINGS]
    for worst, wrong in run_ranks(wander, RANKS, str(tmp_path), layouts, [0, 1, 2, 3, 4, 5, 0])[0]:
        assert not wrong
        assert worst <= 1e-9


MUON = replace(START.optim, rule="muon")
SOME_FROZEN = replace(START.optim, groups=("blocks.0.*: frozen", "*.router.weight: rule=muon"))
RULES = [(START.optim, SHARDINGS[0]), (MUON, SHARDINGS[1]), (SOME_FROZEN, SHARDINGS[2]), (START.optim, SHARDINGS[5])]


def change_rules(world: World, folder: str, configs: list[Config]) -> list[float]:
    """Losses of a run that goes on under each configuration in turn, each in a new run."""
    found: list[float] = []
    source = ""
    for number, config in enumerate(configs):
        here = world
        if world.size > 1:
            degrees = config.parallel
            here = create_world(world.rank, world.size, world.device, degrees, node_size=2, shard=config.shard)
        run = assemble_run(config, here, Path(folder) / str(number), corpus=random_corpus(config))
        if source:
            resume_run(run, source, str)
        reports = [train_step(run, run.loader.next_batch()) for _ in range(2)]
        found += [report.loss for report in reports]
        source = str(write(run, make_background_saver(run, str)).path)
    return found


@pytest.mark.extended
def test_other_rules_in_other_shardings_take_up_what_they_would_on_one_rank(tmp_path: Path):
    start = replace(START, train=replace(START.train, precision="fp64"))
    alone = [replace(start, optim=optim) for optim, _ in RULES]
    spread = [replace(start, optim=optim, shard=shard, parallel=parallel) for optim, (shard, parallel) in RULES]
    expected = change_rules(single_rank_world(), str(tmp_path / "alone"), alone)
    for found in run_ranks(change_rules, RANKS, str(tmp_path / "spread"), spread):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.extended
def test_split_bf16_weights_are_taken_up_by_another_sharding(tmp_path: Path):
    start = replace(START, optim=replace(START.optim, main="split"), train=replace(START.train, precision="bf16"))
    layouts = [replace(start, shard=shard, parallel=parallel) for shard, parallel in SHARDINGS[:2]]
    for _, wrong in run_ranks(wander, RANKS, str(tmp_path), layouts, [0, 1, 0])[0]:
        assert not wrong


def test_the_layouts_of_that_way_use_every_axis():
    layouts, _ = chosen_layouts(seed=7)
    for axis in AXES:
        assert any(getattr(config.parallel, axis) > 1 for config in layouts), axis
    assert any(config.pipeline.vpp > 1 for config in layouts)
