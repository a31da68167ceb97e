"""Runs that offload regions are equal, to the bit, to runs that keep everything on the device; what leaves the device
is what the planner says; the host pool keeps its bound; copies back begin before backward asks for them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.anatomy.regions import regions_of
from moefold.config.errors import UserError
from moefold.config.memory_regions import OFFLOADED_REGIONS
from moefold.config.run import Config, MemoryConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.memory.choose import attach_configured_policies
from moefold.memory.copies import Arrival, Departure, PlainCopier
from moefold.memory.host_pool import SLAB_BYTES, HostBlock, HostPool
from moefold.memory.offload import OFFLOADS, Offloader, PassOffloads, attach_offloader, offloader_of
from moefold.model.steps import Carry
from moefold.model.transformer import Transformer
from moefold.plan.layer.layer_costs import count_piece
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.memory.peak_memory import plan_memory
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus, trace_run
from moefold.train.step import take_next_step
from tests.memory.test_recompute import (
    LAYOUTS,
    MECHANISMS,
    SIZES,
    STEPS,
    configured,
    differing,
    kept_trace,
    recomputing,
)
from tests.memory.test_recompute_bytes import MODELS
from tests.plan.layer.test_moefold_layers import real
from tests.support.ranks import run_ranks

CHOICES = [" > layer", " > norm,core,out,shared", "norm > moe@1,core", "layer > layer", "norm,core,experts > layer"]
CASES = [(mechanism, choice) for mechanism in MECHANISMS for choice in CHOICES]


@pytest.mark.parametrize(("mechanism", "choice"), CASES)
def test_an_offloading_run_is_equal_to_the_bit(mechanism: str, choice: str):
    config = recomputing(configured(mechanism), choice)
    offloading = trace_run(config, single_rank_world(), STEPS)
    assert differing(offloading, kept_trace(mechanism)) == []


# ---- bytes

LEAST = 4096  # bytes of the smallest tensor: the planner's tables have the others as one, or not at all
BYTE_CASES = [(name, region) for name in MODELS for region in OFFLOADED_REGIONS]


def offloading_model(words: str, memory: MemoryConfig) -> tuple[Transformer, Config]:
    sizes = ["--data.seq_len=64", "--train.micro_batch=2", "--model.layers=3"]
    config = resolve_recipe("tiny", [*words.split(), *sizes])
    config = replace(config, memory=memory)
    model = real(config, "fp32", "cpu")
    attach_configured_policies(model, config)
    return model, config


def run_forward(model: Transformer, config: Config) -> Carry:
    shape = (2, config.train.micro_batch, config.data.seq_len)
    tokens, labels = torch.randint(256, shape, generator=torch.Generator().manual_seed(1))
    carry = model.begin(tokens, labels)
    for step in model.steps(model.stages[0]):
        carry = step.run(carry)
    return carry


def bytes_on_host(carry: Carry) -> int:
    found = 0
    for bundle in carry[OFFLOADS].bundles.values():
        for reference in bundle.members:
            member = reference()
            if member is not None and member.block is not None:
                assert member.memory is None, "its device memory is free"
                found += member.nbytes
    return found


def planned_on_host(config: Config) -> float:
    model = config.model
    memory = config.memory
    choices = PlanChoices(precision="fp32", device="cpu", recompute=memory.recompute, offload=memory.offload)
    portion = make_rank_portion(config, "local", defers_wgrad=False)
    layers = [("t", layer) for layer in range(model.layers)]
    ahead = [("m", model.layers + depth) for depth in range(model.mtp)]
    found = 0.0
    for piece, layer in [("E", 0), *layers, *ahead, ("L", 0)]:
        for step in count_piece(model, piece, layer, portion, choices).steps:
            tensors = [tensor for tensor in step.saved if tensor.fate == "offloaded"]
            found += sum(tensor.bytes for tensor in tensors if is_counted(tensor.name, tensor.bytes))
    return found


def is_counted(name: str, size: float) -> bool:
    return size >= LEAST and not (name.endswith("twice") and size < 2 * LEAST)


@pytest.mark.parametrize("recompute", [(), ("norm",), ("experts",)])
@pytest.mark.parametrize(("name", "region"), BYTE_CASES)
def test_what_leaves_the_device_is_what_the_planner_says(name: str, region: str, recompute: tuple[str, ...]):
    memory = MemoryConfig(recompute=recompute, offload=(region,), offload_least=LEAST)
    config = resolve_recipe("tiny", MODELS[name].split())
    inside_recomputed = recompute == ("experts",) and region == "activation"
    # A norm behind a layer that looks ahead reads a stream that the carry holds to its end.
    if region in regions_of(config.model, {}) and not inside_recomputed and (name, region) != ("tokens ahead", "norm"):
        model, config = offloading_model(MODELS[name], memory)
        carry = run_forward(model, config)
        assert bytes_on_host(carry) == planned_on_host(config)
        offloader = offloader_of(model)
        assert offloader is not None
        assert not offloader.leaving
        assert offloader.refused_bytes == 0


def test_views_are_copied_once_and_weights_and_small_tensors_never():
    copier = LoggedCopier()
    offloader = Offloader({"layer": frozenset({0})}, lambda: [weight], copier, limit=2**20, least=64)
    weight = torch.randn(32, 32, requires_grad=True)
    x = torch.randn(32, 32)
    small = torch.randn(4, requires_grad=True)

    with offloader.saving(PassOffloads(offloader), 0, inside=True):
        y = (x * weight).sum() + (x.T @ weight).sum() + (x[:16] * weight[:16]).sum() + (small * small).sum()
    assert copier.log == ["out 4096"]
    y.backward()
    expected = torch.autograd.grad(
        (x * weight).sum() + (x.T @ weight).sum() + (x[:16] * weight[:16]).sum(), weight
    )[0]  # fmt: skip
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_a_full_pool_leaves_tensors_on_the_device():
    memory = MemoryConfig(offload=("layer",), offload_least=LEAST, offload_gib=2**17 / 2**30)
    model, config = offloading_model(MODELS["norms of heads"], memory)
    carry = run_forward(model, config)
    offloader = offloader_of(model)
    assert offloader is not None
    assert 0 < bytes_on_host(carry) <= 2**17 == offloader.pool.allocated
    assert offloader.refused_bytes > 0
    carry["losses_1M"].sum().backward()
    free = sum(block.end - block.begin for slab in offloader.pool.slabs for block in slab.free)
    assert free + sum(block.end - block.begin for block in offloader.pool.returned) == 2**17


def test_blocks_never_overlap_and_free_neighbours_join():
    generator = random.Random(1)
    pool = HostPool(4 * SLAB_BYTES, lambda count: torch.empty(count, dtype=torch.uint8))
    held: list[HostBlock] = []
    for _ in range(2000):
        if held and generator.random() < 0.5:
            pool.give_back(held.pop(generator.randrange(len(held))))
        else:
            block = pool.take(generator.randrange(1, SLAB_BYTES // 3))
            if block is not None:
                held.append(block)
        places = sorted((id(block.slab), block.begin, block.end) for block in held)
        for one, two in pairwise(places):
            assert one[0] != two[0] or one[2] <= two[1]
    assert pool.allocated == pool.limit
    for block in held:
        pool.give_back(block)
    assert pool.take(SLAB_BYTES) is not None, "one whole slab"
    assert pool.take(pool.limit) is None


# ---- order


class LoggedCopier(PlainCopier):
    def __init__(self):
        self.log: list[str] = []

    def to_host(self, source: Tensor, block: HostBlock) -> Departure:
        self.log.append(f"out {source.numel()}")
        return super().to_host(source, block)

    def to_device(self, block: HostBlock, nbytes: int, after: Departure) -> Arrival:
        self.log.append(f"in {nbytes}")
        return super().to_device(block, nbytes, after)


def test_a_layer_comes_back_while_backward_is_at_the_one_behind_it():
    """Each layer offloads the input of one norm. With whole layers recomputed, this input is all that is kept."""
    config = resolve_recipe("tiny", ["--model.layers=4", "--data.seq_len=32", "--train.micro_batch=1"])
    config = replace(config, memory=MemoryConfig(recompute=("layer",)))
    model = real(config, "fp32", "cpu")
    attach_configured_policies(model, config)
    copier = LoggedCopier()
    layers = frozenset({0, 1, 2})
    attach_offloader(model, Offloader({"layer": layers}, model.parameters, copier, limit=2**20, least=LEAST))
    carry = run_forward(model, config)
    assert len(copier.log) == 3
    copier.log.clear()
    logged: list[tuple[int, int]] = []
    for number, block in enumerate(model.blocks):
        weight = block.attention.norm.weight
        weight.register_hook(lambda _, number=number: logged.append((number, len(copier.log))))
    carry["losses_1M"].sum().backward()
    assert logged == [(3, 1), (2, 2), (1, 3), (0, 3)], "layer, and copies that had begun when its backward ended"


def test_copies_of_two_layers_are_under_way_and_of_one_where_memory_is_at_its_peak():
    config = resolve_recipe("tiny", ["--model.layers=6", "--data.seq_len=32", "--train.micro_batch=1"])
    model = real(config, "fp32", "cpu")
    offloader = Offloader({"experts": frozenset(range(5))}, model.parameters, PlainCopier(), limit=2**30, least=LEAST)
    attach_offloader(model, offloader)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    carry = model.begin(tokens, tokens)
    under_way: dict[int | None, int] = {}
    for step in model.steps(model.stages[0]):
        carry = step.run(carry)
        bundles = {id(member.bundle) for member in offloader.leaving}
        under_way[step.layer] = len(bundles)
    assert under_way == {0: 1, 1: 2, 2: 2, 3: 2, 4: 1, 5: 0, None: 0}, "by layer, at its end"


def late_layers(world: World, config: Config) -> tuple[int, int, int]:
    here = create_world(world.rank, world.size, world.device, config.parallel)
    run = assemble_run(config, here, Path("."), random_corpus(config))
    take_next_step(run)
    offloader = offloader_of(run.model)
    assert offloader is not None
    return offloader.copied_bytes, offloader.late_layers, len(offloader.leaving)


@pytest.mark.parametrize("layout", ["zero bubble", "paired", "two microbatches in step", "interleaved on eight ranks"])
def test_copies_back_begin_in_time_in_any_schedule(layout: str):
    size, words = LAYOUTS[layout]
    degrees = ["--train.global_batch", "8", "--train.micro_batch", "1", "--model.attention.kv_heads", "2"]
    config = recomputing(resolve_recipe("tiny", [*SIZES, *degrees, *words], size), " > layer")
    copied, late, leaving = zip(*run_ranks(late_layers, size, config), strict=True)
    assert any(copied)
    assert not any(late)
    assert not any(leaving), "device memory of a step that has ended"


# ---- refusals and the planner


def test_a_region_that_the_model_lacks_is_refused_by_name():
    with pytest.raises(UserError, match="attention is gqa"):
        trace_run(recomputing(configured("plain"), " > up"), single_rank_world(), 1)
    with pytest.raises(UserError, match=r'memory\.offload: no region "mlp" in layers 1'):
        trace_run(recomputing(configured("plain"), " > mlp@1"), single_rank_world(), 1)


def test_the_planned_peak_falls_by_nearly_all_that_is_planned_on_the_host():
    """As long as the peak is at the end of forward."""
    words = ["--data.seq_len=32768", "--train.micro_batch=1", "--train.global_batch=1", "--optim.moments=bf16"]
    config = resolve_recipe("olmoe-1b-7b", [*words, "--optim.main=split", "--optim.gradients=bf16"])
    offloading = replace(config, memory=MemoryConfig(offload=("experts@0-7",)))
    [kept] = plan_memory(config, 1, PlanChoices())
    [offloaded] = plan_memory(offloading, 1, PlanChoices())
    assert kept.host == 0
    assert 0.9 * offloaded.host < kept.total - offloaded.total <= offloaded.host
