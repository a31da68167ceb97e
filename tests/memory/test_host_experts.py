"""Experts whose frozen weights lie on the host: no bit of a run changes, at most two layers' weights are on the device,
and each is fetched ahead of its use, in any program. Copies of a CPU end at once; the code is that of a GPU."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moefold.anatomy.host_experts import experts_on_host
from moefold.checkpoint.hf.read_weights import local_tensors
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.run import Config, LoraConfig, MemoryConfig, ParallelConfig, PipelineConfig, ShardConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.held_share import held_values_of
from moefold.layout.host_copies import host_copies_of
from moefold.memory.host_experts import FetchedExperts
from moefold.model.steps import PassKey, PassKind, Step
from moefold.model.transformer import Transformer
from moefold.shard.gathered_units import GatheredUnits, sharded_storage
from moefold.train.assemble import Run, assemble_run
from moefold.train.finite_checks import bad_state
from moefold.train.parity import random_corpus
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, corpus
from tests.train.test_lora_runs import LORA, config_of, random_adapters

HOST = ("expert_weights",)
Parts = dict[str, torch.Tensor]


def deep_config(world: int = 1, layers: int = 4, lora: LoraConfig = LORA, **changes: Any) -> Config:
    """In fp32, several microbatches, and more layers than are on the device."""
    config = config_of("tiny", world, lora=lora, **changes)
    train = replace(config.train, precision="fp32", micro_batch=1)
    model = replace(config.model, layers=layers)
    return replace(config, model=model, train=train, pipeline=replace(config.pipeline, layout=""))


def on_host(config: Config, entries: tuple[str, ...] = HOST) -> Config:
    return replace(config, memory=replace(config.memory, offload=(*entries, *config.memory.offload)))


def device_bytes(model: Transformer) -> int:
    """Of expert weights that have host memory too."""
    copies = [copy for parameter in model.parameters() for copy in host_copies_of(parameter)]
    return sum(copy.on_device.untyped_storage().nbytes() for copy in copies)


class DeviceExperts:
    """An observer: the most bytes of expert weights on the device around a step."""

    def __init__(self, model: Transformer):
        self.model = model
        self.most = 0

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        self.most = max(self.most, device_bytes(self.model))

    after = before


def window_of(run: Run) -> FetchedExperts:
    (window,) = [each for each in run.executor.around if isinstance(each, FetchedExperts)]
    return window


def stepped(run: Run, steps: int = 2) -> tuple[list[float], Parts]:
    """Losses and trained parameters, from adapters that are not zero."""
    random_adapters(run)
    losses = [take_next_step(run).loss for _ in range(steps)]
    run.parameters.await_all_buckets()
    trained = {name: each.detach().clone() for name, each in run.model.named_parameters() if each.requires_grad}
    return losses, trained


def assembled(config: Config, world: World | None = None, **start: Any) -> Run:
    return assemble_run(config, world or single_rank_world(), Path("."), random_corpus(config), **start)


def difference(config: Config, entries: tuple[str, ...] = HOST, world: World | None = None) -> str:
    """How a run with these experts on the host differs from one without; empty if it does not."""
    losses, trained = stepped(assembled(config, world))
    held = on_host(config, entries)
    run = assembled(held, world)
    if device_bytes(run.model):
        return "experts are on the device before the first step"
    watch = DeviceExperts(run.model)
    with run.executor.observed_by(watch):
        actual, moved = stepped(run)
    units = [layer.bytes for layer in experts_on_host(held, wide=4.0)]
    window = window_of(run)
    sizes = {unit: [copy.on_host.untyped_storage().nbytes() for copy in window.copies(unit)] for unit in window.units()}
    if not set(map(sum, sizes.values())) <= set(units):
        return f"bytes of experts on the host are {sizes}; planned are {units} a layer"
    allowed = (4 if config.pipeline.pair else 2) * max(units)
    if not 0 < watch.most <= allowed:
        return f"{watch.most} bytes of experts on the device; {allowed} are allowed"
    late = window_of(run).late_units
    take_next_step(run)
    if window_of(run).late_units > late + 1:  # the first pass of a step may be of another stage than the last
        return "units were not fetched ahead"
    if actual != losses:
        return f"losses {actual}; without {losses}"
    return next((f"{name} differs" for name in trained if not torch.equal(moved[name], trained[name])), "")


FREEZING = {"groups": ("*.moe.experts.*: frozen",)}
WAYS: dict[str, Config] = {
    "nf4, the whole layer recomputed": deep_config(
        lora=replace(LORA, base="nf4"), memory=MemoryConfig(recompute=("layer",))
    ),
    "fp8 in blocks, chunks": deep_config(lora=replace(LORA, base="fp8"), memory=MemoryConfig(expert_chunk=128)),
    "selective, beside offloaded tensors": deep_config(
        memory=MemoryConfig(recompute=("sar",), offload=("core", "experts"), offload_least=1)
    ),
    "paired, deferred": deep_config(pipeline=PipelineConfig(pair=True, defer=True)),
}


@pytest.mark.parametrize("name", WAYS)
def test_no_bit_changes(name: str):
    assert not difference(WAYS[name])


def test_layers_that_groups_freeze():
    config = deep_config(lora=LoraConfig())
    config = replace(config, optim=replace(config.optim, **FREEZING))
    assert not difference(config, ("expert_weights@1-3",))
    trained = replace(config, optim=replace(config.optim, groups=("*.moe.experts.down: frozen",)))
    with pytest.raises(UserError, match=r"blocks\.1\.moe\.experts\.gate_up is trained"):
        assembled(on_host(trained, ("expert_weights@1-3",)))


def test_each_layer_is_fetched_ahead_and_no_more_often_than_two_units_need():
    """A pass finds the two layers that the one before it ended with, forward and backward."""
    config = on_host(deep_config())
    run = assembled(config)
    window = window_of(run)
    take_next_step(run)
    late = window.late_units
    before = window.fetched_bytes
    steps = 2
    for _ in range(steps):
        take_next_step(run)
    assert window.late_units == late
    layers = len(experts_on_host(config))
    unit = experts_on_host(config, wide=4.0)[0].bytes
    microbatches = config.train.global_batch // config.train.micro_batch
    assert microbatches > 1
    assert window.fetched_bytes - before == steps * microbatches * 2 * (layers - 2) * unit


def test_a_bad_weight_is_found_while_it_is_on_the_host():
    run = assembled(on_host(deep_config()))
    assert bad_state(run) is None
    name = "blocks.3.moe.experts.down"
    (copy,) = host_copies_of(run.model.get_parameter(name))
    copy.on_host.view(-1)[5] = torch.nan
    bad = bad_state(run)
    assert bad is not None
    assert (bad.kind, bad.tensor, bad.expert) == ("weight", name, 0)


def compare_layouts(world: World, configs: list[Config]) -> list[str]:
    found: list[str] = []
    for config in configs:
        here = create_world(world.rank, world.size, world.device, config.parallel)
        found.append(difference(config, HOST, here))
    return found


@pytest.mark.extended
def test_layouts_of_four_ranks():
    """Interleaved stages of two layers, whose passes follow each other as the program says; experts and their inner
    width over ranks, in blocks."""
    stages = deep_config(
        4, layers=8, parallel=ParallelConfig(pp=2, ep=2), pipeline=PipelineConfig(schedule="1f1b", vpp=2)
    )
    width = deep_config(4, lora=replace(LORA, base="mxfp4"), parallel=ParallelConfig(tp=2, ep=2, etp=2))
    moe = replace(width.model.moe, ffn=64)
    attention = replace(width.model.attention, head_dim=32)
    width = replace(width, model=replace(width.model, moe=moe, attention=attention))
    for found in run_ranks(compare_layouts, 4, [stages, width]):
        assert found == ["", ""]


def held_parts(run: Run) -> Parts:
    """What a rank holds of trained parameters."""
    trained = [(name, each) for name, each in run.model.named_parameters() if each.requires_grad]
    values = {name: held_values_of(each).values for name, each in trained}
    return {name: held.detach().clone() for name, held in values.items() if isinstance(held, torch.Tensor)}


class GatheredExperts:
    """An observer: the most layers whose experts have memory to gather to, around a step."""

    def __init__(self, run: Run):
        assert isinstance(run.parameters, GatheredUnits)
        self.buckets = [bucket for bucket in run.parameters.buckets if bucket.key.on_host]
        self.most = 0

    def layers(self) -> set[str]:
        memory = [(bucket.unit, each) for bucket in self.buckets for each in sharded_storage(bucket).gathered_memory()]
        return {unit for unit, each in memory if each.untyped_storage().nbytes()}

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        self.most = max(self.most, len(self.layers()))

    after = before


def difference_in_shares(config: Config, entries: tuple[str, ...], world: World) -> str:
    """How a fully sharded run with its shares of these experts on the host differs from one without."""
    plain = assembled(config, world)
    losses = [take_next_step(plain).loss for _ in range(3)]  # B is zero in the first
    expected = held_parts(plain)
    run = assembled(on_host(config, entries), world)
    watch = GatheredExperts(run)
    if watch.layers():
        return "experts are on the device before the first step"
    named = {parameter.name for bucket in watch.buckets for parameter in bucket.parameters}
    layers = {str(experts.layer) for experts in experts_on_host(run.config)}
    base = [name for name, _ in run.model.named_parameters() if ".experts." in name and ".lora." not in name]
    if named != {name for name in base if name.split(".")[1] in layers}:
        return f"{named} are on the host"
    with run.executor.observed_by(watch):
        actual = [take_next_step(run).loss for _ in losses]
    if watch.most != min(2, len({bucket.unit for bucket in watch.buckets})):
        return f"experts of {watch.most} layers at a time"
    if actual != losses:
        return f"losses {actual}; without {losses}"
    parts = held_parts(run)
    return next((f"{name} differs" for name in expected if not torch.equal(parts[name], expected[name])), "")


def compare_shares(world: World, cases: list[tuple[Config, tuple[str, ...]]]) -> list[str]:
    found: list[str] = []
    for config, entries in cases:
        here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
        found.append(difference_in_shares(config, entries, here))
    return found


@pytest.mark.extended
def test_shares_of_four_ranks():
    """With replicas a share is a part of the experts, in blocks whole rows; with experts over all ranks it is all that
    a rank has."""
    sharded = ShardConfig("zero3")
    frozen = deep_config(4, lora=LoraConfig(), shard=sharded, parallel=ParallelConfig(ep=2))
    frozen = replace(frozen, optim=replace(frozen.optim, **FREEZING))
    cases = [
        (deep_config(4, shard=ShardConfig("zero3", 2), memory=MemoryConfig(recompute=("layer",))), HOST),
        (deep_config(4, lora=replace(LORA, base="nf4"), shard=sharded, parallel=ParallelConfig(ep=4)), HOST),
        (deep_config(4, lora=replace(LORA, base="fp8"), shard=sharded, parallel=ParallelConfig(pp=2)), HOST),
        (frozen, ("expert_weights@1-3",)),
    ]
    for found in run_ranks(compare_shares, 4, cases):
        assert found == [""] * len(cases)


@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_given_weights_are_filled_on_the_host(base: Any):
    """As the import of published weights fills them, an expert at a time."""
    lora = replace(LORA, base=base)
    source = assembled(deep_config())
    values = {name: each.detach() for name, each in source.model.named_parameters() if ".lora." not in name}

    @torch.no_grad()
    def fill(model: Transformer) -> None:
        for name, parts in local_tensors(model).items():
            for held in parts:
                if name in values:
                    held.tensor.copy_(values[name])
        assert device_bytes(model) == 0

    expected = stepped(assembled(deep_config(lora=lora), weights=fill), 1)
    actual = stepped(assembled(on_host(deep_config(lora=lora)), weights=fill), 1)
    assert actual[0] == expected[0]


def last_tensors(run: Path) -> Parts:
    files = (run / "checkpoints" / "step-00000002").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_run_goes_on_from_its_checkpoint_and_writes_that_of_any_run(tmp_path: Path):
    """To the bit; files of its adapters are those of a run with all experts on the device, too."""
    words = ["train", "tiny", *SMALL, *corpus(tmp_path), "--train.steps", "2", "--checkpoint.every", "1"]
    words += ["--model.moe.balance.bias_rate", "0", "--lora.rank", "2", "--model.layers", "3"]
    host = ["--memory.offload", "expert_weights"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run_command_line([*words, "--out", str(tmp_path / "plain")]) == 0
        assert run_command_line([*words, *host, "--out", str(tmp_path / "host")]) == 0
        shutil.rmtree(tmp_path / "host" / "checkpoints" / "step-00000002")
        assert run_command_line([*words, *host, "--out", str(tmp_path / "host"), "--resume", "auto"]) == 0
        for name in ("plain", "host"):
            adapter = str(tmp_path / f"{name}-adapter")
            assert run_command_line(["convert", str(tmp_path / name), adapter, "--to", "peft"]) == 0
    expected = last_tensors(tmp_path / "plain")
    actual = last_tensors(tmp_path / "host")
    assert actual.keys() == expected.keys()
    for name in expected.keys() - {name for name in expected if name.startswith("random")}:
        assert torch.equal(actual[name], expected[name]), name
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        written = tmp_path / "host-adapter" / file
        assert written.read_bytes() == (tmp_path / "plain-adapter" / file).read_bytes()
