"""What a pipeline saves, any other loads exactly: weights, optimizer and balance, also where stages share a piece."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.checkpoint.format.boxes import element_count
from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.verify import open_checkpoint
from moefold.checkpoint.live.load import load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.checkpoint.live.save import save_checkpoint
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.model.moe.router import ExpertLoad
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import random_corpus, shrink_config
from tests.checkpoint.live.test_logical_tensors import ignore, whole_values
from tests.support.ranks import run_ranks

Layout = tuple[PipelineConfig, dict[str, int]]
ROUTE: list[Layout] = [
    (PipelineConfig("1f1b", 2), {"pp": 2}),
    (PipelineConfig(), {}),
    (PipelineConfig("1f1b", 2), {"pp": 2, "ep": 2}),
    (PipelineConfig("zb_h1"), {"pp": 4}),
    (PipelineConfig("dualpipe_v", 2), {"pp": 2, "tp": 2}),
    (PipelineConfig("interleaved", 2), {"pp": 4}),
    (PipelineConfig("1f1b", layout="E|tt|t*4m|L"), {"pp": 4}),
    (PipelineConfig("zb_v", 2, layout="Ettt|t|tt|mL"), {"pp": 2, "cp": 2}),
    (PipelineConfig("1f1b", 2), {"pp": 2}),
]


def config_of(layout: Layout, world: int) -> Config:
    """A layer that looks ahead and a tied head: up to three ranks hold the embedding."""
    pipeline, degrees = layout
    start = PRESETS["deepseek-v3-tiny"]()
    start = replace(start, parallel=ParallelConfig(**degrees), model=replace(start.model, tied_head=True))
    start = replace(start, pipeline=replace(pipeline, layout=""), train=replace(start.train, precision="bf16"))
    small = shrink_config(start, world)
    attention = replace(small.model.attention, heads=4, kv_heads=4)
    moe = replace(small.model.moe, shared_ffn=16)  # the same on every layout
    model = replace(small.model, layers=6, vocab=256, dense_ffn=32, attention=attention, moe=moe)
    data = replace(small.data, seq_len=16)
    return replace(small, model=model, data=data, pipeline=pipeline)


def made(layout: Layout, world: World) -> Run:
    config = config_of(layout, world.size)
    return assemble_run(config, world, Path("."), corpus=random_corpus(config))


def pieces(run: Run) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, what this rank holds, what that should be)."""
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for bucket in run.gradients.buckets:
        for p, view in bucket.parameter_views(bucket.weights):
            place = tuple(slice(start, start + size) for start, size in p.part)
            found.append((p.name, view, whole_values(p, "weight", view.dtype)[place]))
    for p, kind, first, values in run.optimizer.state():
        place = tuple(slice(start, start + size) for start, size in p.part)
        mine = whole_values(p, kind, values.dtype)[place].flatten()
        found.append((f"{p.name}.{kind}", values, mine[first : first + len(values)]))
    for module in run.model.modules():
        if isinstance(module, ExpertLoad):
            found.append(
                (f"bias {module.layer}", module.bias_E, torch.arange(len(module.bias_E)) + 10.0 * module.layer)
            )
    return found


def write(run: Run, folder: str) -> None:
    for _, mine, right in pieces(run):
        mine.copy_(right)
    save_checkpoint(
        Path(folder), 1, collect_tensors(run.model, run.optimizer), {"step": 1}, RetentionPolicy(1), run.world
    )


def read(run: Run, folder: str) -> list[str]:
    """The names of what is not exactly what was saved."""
    for _, mine, _ in pieces(run):
        mine.fill_(-77.0)
    load_checkpoint(
        require_checkpoint(Path(folder), run.world, ignore),
        collect_tensors(run.model, run.optimizer),
        optional=set(),
        world=run.world,
    )
    return [name for name, mine, right in pieces(run) if not torch.equal(mine, right)]


def move(world: World, folder: str, route: list[Layout]) -> list[list[str]]:
    """Written under each layout and read under the next, in the same processes."""
    runs = [
        made(layout, create_world(world.rank, world.size, world.device, ParallelConfig(**layout[1])))
        for layout in route
    ]
    wrong = []
    for number, (writer, reader) in enumerate(pairwise(runs)):
        write(writer, f"{folder}/{number}")
        wrong.append(read(reader, f"{folder}/{number}"))
    return wrong


@pytest.mark.extended
def test_what_one_pipeline_saves_another_loads_exactly_optimizer_included(tmp_path: Path):
    for rank, wrong in enumerate(run_ranks(move, 4, str(tmp_path), ROUTE)):
        for (writer, reader), names in zip(pairwise(ROUTE), wrong, strict=True):
            assert not names, f"rank {rank}, written as {writer}, read as {reader}: {names}"
    ledgers = {path.read_bytes() for path in tmp_path.glob("*/step-*/ledger.json")}
    assert len(ledgers) == 1, "the ledger is the same whatever layout wrote it"
    for folder in sorted(tmp_path.glob("*/step-*")):
        opened = open_checkpoint(folder)
        for name, entry in opened.ledger.items():
            written = sum(element_count(chunk.box) for chunk in opened.index[name])
            assert written == prod(entry.shape), f"{folder.parent.name} {name}: every element is written once"


def write_there(world: World, folder: str, layout: Layout) -> None:
    write(made(layout, world), folder)


def read_there(world: World, folder: str, layout: Layout) -> list[str]:
    return read(made(layout, world), folder)


def test_one_rank_loads_what_a_pipeline_saved_and_a_longer_pipeline_what_one_rank_saved(tmp_path: Path):
    two: Layout = (PipelineConfig("1f1b", 2), {"pp": 2})
    four: Layout = (PipelineConfig("1f1b"), {"pp": 4})
    one: Layout = (PipelineConfig(), {})
    more: dict[str, Any] = {"pp": 2}
    run_ranks(write_there, 2, str(tmp_path / "two"), two, **more)
    assert read(made(one, single_rank_world()), str(tmp_path / "two")) == []
    write(made(one, single_rank_world()), str(tmp_path / "one"))
    assert run_ranks(read_there, 4, str(tmp_path / "one"), four, pp=4) == [[]] * 4
