"""A checkpoint knows nothing of the layout that wrote it: model and optimizer load under any other, to the bit."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.format.boxes import element_count
from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.verify import open_checkpoint
from moefold.checkpoint.live.load import load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.checkpoint.live.save import save_checkpoint
from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig, OptimConfig, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.model.moe.router import ExpertLoad
from moefold.model.transformer import Transformer
from moefold.optim.optimizer import Optimizer, build_optimizer
from moefold.shard.buckets import fill_buckets
from moefold.train.assemble import default_dtype
from tests.support.models import transformer
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden=12,  # nothing is a multiple of the alignment, so that shares end inside of rows
    vocab=36,
    dense_ffn=20,
    attention=AttentionConfig(heads=8, kv_heads=4, head_dim=6, qk_norm="full", qkv_bias=True, out_bias=True),
    moe=MoeConfig(experts=4, top_k=2, ffn=12, shared_ffn=8, dense_layers=1),
)
KERNELS = BoundKernels(Facts("cpu", "bf16", hidden=12, ffn=12))


def ignore(_: str) -> None: ...


def make(world: World) -> tuple[Transformer, Optimizer]:
    with default_dtype(torch.bfloat16):
        model = transformer(MODEL, 16, KERNELS, world)
    buckets = fill_buckets(model, world)
    return model, build_optimizer(buckets, OptimConfig(), KERNELS)


def whole_values(parameter: DeclaredParameter, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """What the whole of a parameter (or of its state) holds: other numbers for each."""
    generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(parameter.name + kind)))
    return torch.randn(parameter.declaration.shape, generator=generator).to(dtype)


def pieces(model: Transformer, optimizer: Optimizer) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, what this rank holds, what that should be)."""
    found = []
    for p in declared_parameters(model):
        place = tuple(slice(start, start + size) for start, size in p.part)
        found.append((p.name, p.tensor.data, whole_values(p, "weight", p.tensor.dtype)[place]))
    for p, kind, first, values in optimizer.state():
        place = tuple(slice(start, start + size) for start, size in p.part)
        mine = whole_values(p, kind, values.dtype)[place].flatten()
        found.append((f"{p.name}.{kind}", values, mine[first : first + len(values)]))
    for i, module in enumerate(m for m in model.modules() if isinstance(m, ExpertLoad)):
        found.append((f"bias {i}", module.bias_E, torch.arange(4.0) + i))
    return found


def write(world: World, folder: str) -> int:
    model, optimizer = make(world)
    for _, held, right in pieces(model, optimizer):
        held.copy_(right)
    save_checkpoint(Path(folder), 1, collect_tensors(model, optimizer), {"step": 1}, RetentionPolicy(1), world)
    return sum(held.numel() for name, held, _ in pieces(model, optimizer) if name.endswith(".mean"))


def read(world: World, folder: str) -> list[str]:
    """The names of what is not exactly what was saved."""
    model, optimizer = make(world)
    for _, held, _ in pieces(model, optimizer):
        held.fill_(-77.0)
    load_checkpoint(
        require_checkpoint(Path(folder), world, ignore), collect_tensors(model, optimizer), optional=set(), world=world
    )
    return [name for name, held, right in pieces(model, optimizer) if not torch.equal(held, right)]


def move(world: World, folder: str, layouts: list[dict[str, int]]) -> list[list[str]]:
    """Written under each layout and read under the next one of the list, in the same processes."""
    worlds = [create_world(world.rank, world.size, world.device, ParallelConfig(**layout)) for layout in layouts]
    wrong = []
    for number, (writer, reader) in enumerate(pairwise(worlds)):
        write(writer, f"{folder}/{number}")
        wrong.append(read(reader, f"{folder}/{number}"))
    return wrong


ROUTE: list[dict[str, int]] = [
    {},
    {"tp": 2, "cp": 2, "ep": 4},
    {"tp": 4, "etp": 4},
    {"ep": 2, "etp": 2},
    {"cp": 4, "ep": 2},
    {"tp": 2, "etp": 2},
    {"tp": 2, "etp": 2},
    {"ep": 4},
    {},
]


def test_what_one_layout_saves_another_loads_exactly_optimizer_included(tmp_path: Path):
    for rank, wrong in enumerate(run_ranks(move, 4, str(tmp_path), ROUTE)):
        for (writer, reader), names in zip(pairwise(ROUTE), wrong, strict=True):
            assert not names, f"rank {rank}, written as {writer}, read as {reader}: {names}"
    ledgers = {path.read_bytes() for path in tmp_path.glob("*/step-*/ledger.json")}
    assert len(ledgers) == 1, "the ledger is the same whatever layout wrote it"


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "ep": 2, "etp": 2}], ids=str)
def test_one_rank_loads_what_four_saved_and_the_reverse(layout: dict[str, int], tmp_path: Path):
    held = run_ranks(write, 4, str(tmp_path / "four"), **layout)
    assert sum(held) == sum(prod(p.declaration.shape) for p in declared_parameters(make(single_rank_world())[0]))
    assert read(single_rank_world(), str(tmp_path / "four")) == []
    write(single_rank_world(), str(tmp_path / "one"))
    assert run_ranks(read, 4, str(tmp_path / "one"), **layout) == [[]] * 4


def test_every_element_is_written_once(tmp_path: Path):
    run_ranks(write, 4, str(tmp_path), tp=2, ep=2, etp=2)
    opened = open_checkpoint(tmp_path / "step-00000001")
    for name, entry in opened.ledger.items():
        assert sum(element_count(chunk.box) for chunk in opened.index[name]) == prod(entry.shape), name
