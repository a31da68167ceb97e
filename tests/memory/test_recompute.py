"""Runs that recompute regions are equal, to the bit, to runs that keep everything: losses, router statistics, every
gradient, every updated weight."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.config.errors import UserError
from moefold.config.memory_regions import REBUILT_REGIONS
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.config.run import Config, MemoryConfig
from moefold.config.stash_pages import PAGE_BYTES
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.rerun import rerun_key
from moefold.memory.recompute import Promises, Rebuild
from moefold.presets.recipe import resolve_recipe
from moefold.train.parity import RankTrace, trace_run
from tests.support.ranks import run_ranks

SIZES = [
    *("--model.layers", "3", "--model.hidden", "32", "--model.moe.ffn", "32", "--model.moe.experts", "4"),
    *("--model.attention.heads", "2", "--model.attention.kv_heads", "1", "--model.attention.head_dim", "16"),
    *("--model.dense_ffn", "32", "--model.moe.shared_ffn", "16", "--model.moe.dense_layers", "1"),
    *("--model.moe.balance.aux_loss", "0.1", "--model.moe.balance.bias_rate", "0.01", "--optim.warmup", "0"),
    *("--data.seq_len", "16", "--train.global_batch", "2", "--train.micro_batch", "1", "--data.tokenizer", "byte"),
    *("--train.device", "cpu", "--train.precision", "fp32", "--observe.tensorboard", "false"),
]
IN_A_RING = ["--parallel.cp", "2", "--parallel.context", "ring"]
LATENT_ATTENTION = [
    *("--model.attention.kind", "mla", "--model.attention.kv_heads", "2", "--model.attention.rope_dim", "16"),
    *("--model.attention.head_dim", "32"),
    *("--model.attention.q_rank", "16", "--model.attention.kv_rank", "16", "--model.attention.qk_norm", "none"),
]
FP8_EXPERTS = ["--model.moe.ffn", "128", "--model.moe.activation", "swiglu"]
MECHANISMS: dict[str, list[str]] = {
    "plain": ["--model.attention.qk_norm", "head"],
    "bf16": ["--train.precision", "bf16", "--model.attention.qk_norm", "full"],
    "latent attention": LATENT_ATTENTION,
    "no query latent": [*LATENT_ATTENTION, "--model.attention.q_rank", "0"],
    "tokens ahead": ["--model.mtp", "2", "--model.mtp_loss", "0.3"],
    "capacity": ["--model.moe.capacity.factor", "1.0", "--model.moe.capacity.pad", "true"],
    "documents": ["--data.attend", "document", "--model.attention.window", "8", "--model.attention.sinks", "true"],
    "jitter": ["--model.moe.router.jitter", "0.1", "--model.moe.shared_gate", "true"],
    "latent experts": ["--model.moe.latent", "16", "--model.moe.gate", "output"],
    "biases": ["--model.moe.biases", "true", "--model.moe.activation", "clamped_swiglu"],
    "fp8 blocks": ["--precision.recipe", "fp8_block", *LATENT_ATTENTION],
    "fp8 rows, one function": ["--precision.recipe", "fp8_row", *FP8_EXPERTS],
    "fp8 tensors, delayed": ["--precision.recipe", "fp8_tensor", "--precision.scaling", "delayed", *FP8_EXPERTS],
    "fp4, rounded by token": ["--precision.recipe", "nvfp4", *LATENT_ATTENTION],
    "fp8 hybrid": ["--precision.recipe", "fp8_hybrid", *LATENT_ATTENTION],
}
STEPS = 2
SEVERAL_REGIONS = [
    "norm,activation,core,mlp,shared",
    "layer@0-1,moe@2,norm",
    "experts@1,norm@0-1,activation@2,dispatch@1-2",
]
ON_ONE_RANK = [name for name in REBUILT_REGIONS if name != "swap"]  # which has nothing to swap
CHOICES = [*ON_ONE_RANK, *SEVERAL_REGIONS]
# A run in FP8 takes four times as long: each region once, with others.
CHOICES_IN_FP8 = ["up", "moe", "layer", *SEVERAL_REGIONS]


def configured(mechanism: str) -> Config:
    return resolve_recipe("tiny", [*SIZES, *MECHANISMS[mechanism]], 1)


def recomputing(config: Config, choice: str) -> Config:
    """The configuration with a policy, written as `recomputed regions > offloaded regions`, or with stashed rows, as
    `pages of the pool`."""
    if choice.isdecimal():
        pool = int(choice) * PAGE_BYTES / 2**30
        return replace(config, memory=MemoryConfig(stash="pages", stash_gib=pool))
    recomputed, _, offloaded = choice.partition(" > ")
    memory = MemoryConfig(
        recompute=tuple(filter(None, recomputed.split(","))),
        offload=tuple(filter(None, offloaded.split(","))),
        offload_least=64,
        offload_gib=0.01,
    )
    return replace(config, memory=memory)


def has_regions(config: Config, choice: str) -> bool:
    return choice != "up" or config.model.attention.kind == "mla"


def differing(one: RankTrace, two: RankTrace) -> list[str]:
    assert [entry.what for entry in one] == [entry.what for entry in two]
    pairs = zip(one, two, strict=True)
    return [mine.what for mine, other in pairs if not torch.equal(mine.values, other.values)]


def choices_of(mechanism: str) -> list[str]:
    return CHOICES_IN_FP8 if mechanism.startswith("fp") else CHOICES


CASES = [(mechanism, choice) for mechanism in MECHANISMS for choice in choices_of(mechanism)]


@cache
def kept_trace(mechanism: str) -> RankTrace:
    return trace_run(configured(mechanism), single_rank_world(), STEPS)


@pytest.mark.parametrize(("mechanism", "choice"), CASES)
def test_a_recomputing_run_is_equal_to_the_bit(mechanism: str, choice: str):
    config = configured(mechanism)
    if has_regions(config, choice):
        rebuilt = trace_run(recomputing(config, choice), single_rank_world(), STEPS)
        assert differing(rebuilt, kept_trace(mechanism)) == []


# ---- refusals, reruns, what is held


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("mlp@1-2", 'no region "mlp" in layers 1-2; layers that have it: 0'),
        ("up", "attention is gqa"),
        ("experts@0", 'no region "experts" in layers 0; layers that have it: 1-2'),
    ],
)
def test_a_region_that_the_model_lacks_is_refused_by_name(choice: str, message: str):
    config = recomputing(configured("plain"), choice)
    with pytest.raises(UserError, match=message):
        trace_run(config, single_rank_world(), 1)


def test_an_output_is_freed_behind_its_consumer_and_rebuilt_once_for_two_consumers():
    runs: list[str] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        runs.append("again" if rerun_key() else "first")
        return 2 * x

    promises = Promises()
    policy = Rebuild(promises, drops_saved=False, promises_outputs=True)
    x = torch.arange(4.0).requires_grad_()
    with promises.replacing_saved_tensors():
        y = policy.around(double, x)
        memory = StorageWeakRef(y.untyped_storage())
        loss = (y * y).sum() + y.view(2, 2).square().sum()
    assert not memory.expired()
    del y
    assert memory.expired()
    assert runs == ["first"]
    loss.backward()
    assert runs == ["first", "again"]
    assert x.grad is not None
    assert torch.equal(x.grad, 16 * torch.arange(4.0))
    promises.forget_freed()
    assert not promises.outputs


def test_a_second_backward_through_a_region_is_refused():
    policy = Rebuild(Promises(), drops_saved=True, promises_outputs=False)
    x = torch.ones(3, requires_grad=True)
    y = policy.around(torch.square, x).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        y.backward()


# ---- on several ranks: regions that communicate


LAYOUTS: dict[str, tuple[int, list[str]]] = {  # ranks, and the layout
    "experts on four ranks": (4, ["--parallel.ep", "4"]),
    "tp and ep": (4, ["--parallel.tp", "2", "--parallel.ep", "2"]),
    "a pipeline with tokens ahead": (4, ["--parallel.pp", "2", "--parallel.ep", "2", "--model.mtp", "1"]),
    "zero bubble": (
        4,
        ["--parallel.pp", "2", "--parallel.tp", "2", "--parallel.ep", "2", "--pipeline.schedule", "zb_h1"],
    ),
    "paired": (4, ["--parallel.pp", "2", "--parallel.ep", "2", "--pipeline.pair", "true", "--pipeline.defer", "true"]),
    "two microbatches in step": (
        4,
        ["--parallel.pp", "2", "--parallel.ep", "2", "--pipeline.pair", "true", "--pipeline.pairs", "alike"],
    ),
    "latent attention over tp": (4, ["--parallel.tp", "2", "--parallel.ep", "4", *LATENT_ATTENTION]),
    "everything on eight ranks": (
        8,
        ["--parallel.tp", "2", *IN_A_RING, "--parallel.ep", "2", "--parallel.etp", "2", "--parallel.pp", "2"],
    ),
    "context in a ring on eight ranks": (
        8,
        [*IN_A_RING, "--parallel.cp", "4", "--parallel.ep", "8", "--model.moe.experts", "8"],
    ),
    "dualpipe on eight ranks": (
        8,
        [
            *("--parallel.pp", "4", "--pipeline.schedule", "dualpipe_v", "--pipeline.vpp", "2"),
            *("--parallel.ep", "2", "--model.layers", "8", "--pipeline.pair", "true"),
        ],
    ),
    "interleaved on eight ranks": (
        8,
        [
            *("--parallel.pp", "2", "--pipeline.schedule", "interleaved", "--pipeline.vpp", "2"),
            *("--parallel.ep", "4", "--model.layers", "4", "--parallel.tp", "2"),
        ],
    ),
    "hierarchy of cp, paired": (
        8,
        ["--parallel.pp", "2", *IN_A_RING, "--parallel.ep", "4", "--pipeline.pair", "true"],
    ),
}
STASHES = ["100", "4"]  # the second overflows, in one stage before the other
RANK_CHOICES = ["norm,up,core,shared,experts", "moe", " > layer", "layer > layer", "layer@0,moe@1"]


def trace_choices(world: World, configs: list[Config]) -> list[RankTrace]:
    """Traces of one step of configurations of one layout: making its groups takes as long as many steps. What a policy
    would carry over to a second step is seen on one rank."""
    parallel = configs[0].parallel
    here = create_world(world.rank, world.size, world.device, parallel, node_size=4)
    return [trace_run(config, here, steps=1) for config in configs]


def choices_for(config: Config, world: int) -> list[str]:
    """Those that the configuration allows; two of them on many ranks."""
    is_latent = config.model.attention.kind == "mla"
    choices = [choice if is_latent else choice.replace("up,", "") for choice in RANK_CHOICES]
    legal = [each for each in choices if not broken_rules(ConfigOnRanks(recomputing(config, each), world))]
    return legal if world < 8 else [legal[0], " > layer", legal[-1]]


def with_few_microbatches(config: Config, world: int) -> Config:
    """The configuration with two microbatches for every pipeline stage, but no more than it has. More of them would
    repeat what these show."""
    parallel = config.parallel
    dp = world // (parallel.tp * parallel.cp * parallel.pp)
    batch = min(config.train.global_batch, 2 * parallel.pp * dp)
    return replace(config, train=replace(config.train, global_batch=batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_regions_that_communicate_are_equal_to_the_bit_on_every_rank(layout: str):
    size, words = LAYOUTS[layout]
    degrees = [*SIZES, "--train.global_batch", "8", "--model.attention.kv_heads", "2", *words]
    config = with_few_microbatches(resolve_recipe("tiny", degrees, size), size)
    choices = choices_for(config, size)
    if layout in ("zero bubble", "paired", "two microbatches in step"):
        choices += STASHES
    configs = [config, *(recomputing(config, choice) for choice in choices)]
    for kept, *rebuilt in run_ranks(trace_choices, size, configs):
        for choice, trace in zip(choices, rebuilt, strict=True):
            assert differing(trace, kept) == [], choice
