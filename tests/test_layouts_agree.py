"""Every layout gives what one rank gives: loss, router statistics, gradients, norm, updated weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moefold.config.rules import ConfigOnRanks, broken_rules
from moefold.config.run import Config, ParallelConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.parity import TOLERANCE, TraceEntry, first_mismatch, shrink_config, single_rank_config, trace_run
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks

WORLD = 8
Layout = tuple[Config, str]


def base() -> Config:
    """Every mechanism at once: shared experts, a dense layer, biases, norms over all heads, both kinds of balance."""
    config = PRESETS["tiny"]()
    attention = replace(config.model.attention, qk_norm="full", qkv_bias=True, out_bias=True)
    moe = replace(
        config.model.moe, shared_ffn=16, dense_layers=1, balance=replace(config.model.moe.balance, aux_loss=0.1)
    )
    train = replace(config.train, precision="fp64")
    return replace(config, model=replace(config.model, attention=attention, moe=moe), train=train)


def layouts() -> list[Layout]:
    """All legal degrees in powers of two on 8 ranks; mechanisms, dispatchers and routings take turns along them, so
    that each meets every kind of degree."""
    powers = (1, 2, 4, 8)
    contexts = itertools.cycle(["ring", "all_gather", "all_to_all", "hierarchical", "ring"])
    dispatchers = itertools.cycle(["dedup", "all_to_all", "all_gather", "hierarchical"])
    routings = itertools.cycle(["learned", "skewed", "one expert", "empty experts", "learned"])
    found: list[Layout] = []
    for tp, cp, ep, etp in itertools.product(powers, powers, powers, powers):
        if tp * cp > WORLD or ep * etp > WORLD:
            continue
        parallel = ParallelConfig(tp=tp, cp=cp, ep=ep, etp=etp, context=next(contexts), dispatcher=next(dispatchers))
        config = shrink_config(replace(base(), parallel=parallel), WORLD)
        assert not broken_rules(ConfigOnRanks(config, WORLD)), broken_rules(ConfigOnRanks(config, WORLD))
        found.append((config, next(routings)))
    return found


def trace_all(world: World, cases: list[Layout], steps: int) -> list[list[TraceEntry]]:
    """Several layouts in turn on the same processes: starting them costs more than running a layout, and so does
    folding them for one that is folded already. Ranks 0-3 and 4-7 are taken for two nodes."""
    traces, folded = [], world
    for parallel, some in itertools.groupby(cases, key=lambda case: case[0].parallel):
        if world.size > 1:
            folded = create_world(world.rank, world.size, world.device, parallel, node_size=4)
        traces += [trace_run(config, folded, steps, routing) for config, routing in some]
    return traces


def differences(cases: list[Layout], steps: int = 1, names: Sequence[str] = ()) -> list[str]:
    on_eight = run_ranks(trace_all, WORLD, cases, steps)
    on_one = trace_all(single_rank_world(), [(single_rank_config(config), routing) for config, routing in cases], steps)
    found = []
    for i, (config, routing) in enumerate(cases):
        difference = first_mismatch(on_one[i], [rank[i] for rank in on_eight], TOLERANCE[config.train.precision])
        if difference:
            name = names[i] if names else config.name
            where = f"{config.parallel} in {config.train.precision} with routing {routing}"
            found.append(f"{name}, {where}: {difference}")
    return found


def in_precision(config: Config, precision: str) -> Config:
    return replace(config, train=replace(config.train, precision=precision))


GRID = layouts()
ROUNDED = GRID[::3]  # these in fp32 too: what its rounding does depends on mechanisms, not on how they are combined


@pytest.mark.parametrize("chunk", range(0, len(GRID), 15))
def test_every_layout_on_eight_ranks_agrees_with_one_rank_in_fp64_and_every_third_in_fp32(chunk: int):
    some = GRID[chunk : chunk + 15]
    exact = [(config, routing, "fp64") for config, routing in some]
    rounded = [(config, routing, "fp32") for config, routing in some if (config, routing) in ROUNDED]
    both = sorted(exact + rounded, key=lambda case: some.index(case[:2]))
    found = differences([(in_precision(config, precision), routing) for config, routing, precision in both])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("grid", [GRID, ROUNDED], ids=["fp64", "fp32"])
def test_the_grid_has_every_mechanism_routing_and_degree(grid: list[Layout]):
    assert len(GRID) == 100
    assert {routing for _, routing in grid} == {routing for _, routing in GRID}
    for field in ("context", "dispatcher", "tp", "cp", "ep", "etp"):
        values = {getattr(config.parallel, field) for config, _ in grid}
        assert len(values) == 4, (field, values)


def with_moe(config: Config, **changes: object) -> Config:
    return replace(config, model=replace(config.model, moe=with_moe_keys(config.model.moe, **changes)))


def layout_name(parallel: ParallelConfig) -> str:
    return f"tp{parallel.tp} cp{parallel.cp} ep{parallel.ep} etp{parallel.etp} {parallel.dispatcher}"


TOKEN_HANDLING: list[dict[str, object]] = [
    {"pad_rows": 16},
    {"capacity_factor": 8.0, "pad_to_capacity": True, "drop_over": "sub_sequence"},
    {"capacity_factor": 1.0, "drop_over": "full_sequence"},
    {"capacity_factor": 0.5, "drop_over": "full_sequence", "drop": "position"},
    {"gate": "output"},
]
TRAVELS = [
    ParallelConfig(ep=8, dispatcher="all_to_all"),
    ParallelConfig(ep=4, etp=2, tp=2, dispatcher="dedup"),
    ParallelConfig(ep=8, cp=2, context="ring", dispatcher="all_gather"),
    ParallelConfig(ep=8, tp=2, cp=2, context="ring", dispatcher="hierarchical"),
    ParallelConfig(tp=2, cp=2, context="ring"),
]


@pytest.mark.parametrize("parallel", TRAVELS, ids=layout_name)
def test_every_way_of_handling_tokens_agrees_with_on_one_rank(parallel: ParallelConfig):
    cases = [
        (with_moe(shrink_config(replace(base(), parallel=parallel), WORLD), **how), "skewed") for how in TOKEN_HANDLING
    ]
    on_eight = run_ranks(trace_all, WORLD, cases, 2)
    for i, (config, routing) in enumerate(cases):
        difference = first_mismatch(
            trace_run(single_rank_config(config), single_rank_world(), 2, routing),
            [rank[i] for rank in on_eight],
            TOLERANCE["fp64"],
        )
        assert not difference, f"{TOKEN_HANDLING[i]}: {difference}"


@pytest.mark.parametrize("how", TOKEN_HANDLING[:2] + TOKEN_HANDLING[4:], ids=str)
def test_padding_and_the_place_of_the_gate_change_nothing(how: dict[str, object]):
    config = single_rank_config(shrink_config(base(), 1))
    plain = trace_run(config, single_rank_world(), 2, "skewed")
    assert (
        first_mismatch(plain, [trace_run(with_moe(config, **how), single_rank_world(), 2, "skewed")], TOLERANCE["fp64"])
        is None
    )


SOME_LAYOUTS = [
    ParallelConfig(tp=2, cp=2, ep=4, dispatcher="dedup", context="ring"),
    ParallelConfig(cp=4, ep=2, etp=2, dispatcher="all_to_all", context="all_to_all"),
    ParallelConfig(tp=2, ep=8, dispatcher="hierarchical"),
    ParallelConfig(tp=4, cp=2, ep=2, etp=4, dispatcher="all_gather", context="all_gather"),
    ParallelConfig(cp=8, ep=8, dispatcher="dedup", context="hierarchical"),
]


def in_fp64(config: Config, parallel: ParallelConfig) -> Config:
    return shrink_config(replace(config, parallel=parallel, train=replace(config.train, precision="fp64")), WORLD)


def on_layout(configs: Mapping[str, Config], parallel: ParallelConfig, layouts: int) -> list[tuple[str, Layout]]:
    """Those of the configurations that this layout is for, with their names. Each has so many layouts, and begins with
    another one than the configuration before."""
    found: list[tuple[str, Layout]] = []
    for number, (name, config) in enumerate(configs.items()):
        some = [SOME_LAYOUTS[(number + 2 * i) % len(SOME_LAYOUTS)] for i in range(layouts)]
        if parallel in some:
            found.append((name, (in_fp64(config, parallel), "learned")))
    return found


def require_agreement(named: list[tuple[str, Layout]], steps: int) -> None:
    """One after another in the same processes, which are folded once."""
    names, cases = zip(*named, strict=True)
    found = differences(list(cases), steps, names)
    assert not found, "\n".join(found)


def distinct_presets() -> list[str]:
    """Models that differ in more than their sizes."""
    forms = {repr(replace(PRESETS[name](), name="")): name for name in PRESETS if name.endswith("-tiny")}
    return list(forms.values())


@pytest.mark.parametrize("parallel", SOME_LAYOUTS, ids=layout_name)
def test_every_preset_agrees_with_one_rank(parallel: ParallelConfig):
    presets = {name: PRESETS[name]() for name in distinct_presets()}
    # A second step would show what layers keep between steps, and the test of variants has all of that.
    require_agreement(on_layout(presets, parallel, layouts=2), steps=1)


ROUTERS: list[dict[str, object]] = [
    {"score": "sigmoid", "scale": 2.5, "bias_rate": 0.01, "bias_step": "proportional"},
    {"score": "sigmoid", "normalize": "all", "z_loss": 0.01},
    {"score": "softmax_chosen", "jitter": 0.1},
    {"groups": 4, "groups_chosen": 2, "group_score": "best", "aux_over": "microbatch"},
    {"aux_over": "global_batch"},
    {"aux_over": "previous_batch", "aux_loss": 1.0},
    {"device_loss": 0.5, "devices": 4},
    {"capacity_factor": 0.7, "device_capacity": True, "devices": 4},
    {"force_balance": True},
    {"router": "expert_choice", "looks_ahead": True, "aux_loss": 0.0, "bias_rate": 0.0, "normalize": "none"},
    {"router": "sinkhorn", "looks_ahead": True, "bias_rate": 0.0},
    {"every": 2, "dense_layers": 0, "shared_gate": True},
    {"biases": True, "activation": "clamped_swiglu", "clamp": 0.02, "gate": "output"},
    {"latent": 8},
    {"activation": "geglu", "biases": True, "gate": "output"},
    {"activation": "relu2", "biases": True, "latent": 8},
    {"activation": "gelu"},
]


def variant(changes: dict[str, object]) -> Config:
    config = with_moe(base(), **changes)
    if config.model.moe.activation == "clamped_swiglu":  # which dense MLPs do not have
        return config
    return replace(config, model=replace(config.model, dense_activation=config.model.moe.activation))


@pytest.mark.parametrize("parallel", SOME_LAYOUTS, ids=layout_name)
def test_every_router_balance_and_expert_variant_agrees_with_one_rank(parallel: ParallelConfig):
    variants = {str(changes): variant(changes) for changes in ROUTERS}
    require_agreement(on_layout(variants, parallel, layouts=2), steps=2)


def test_the_published_example_of_256_ranks_folds_and_builds():
    """256 ranks: tp 4, cp 2, dp 8, pp 4 with etp 1, ep 64, edp 1, under torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parallel = ParallelConfig(tp=4, cp=2, pp=4, ep=64)
    for rank in (0, 77, 255):
        dist.init_process_group("fake", rank=rank, world_size=256, store=FakeStore())
        try:
            world = create_world(rank, 256, torch.device("cpu"), parallel, node_size=8)
        finally:
            dist.destroy_process_group()
        assert world.dense.sizes == {"pp": 4, "dp": 8, "cp": 2, "tp": 4}
        assert world.expert.sizes == {"pp": 4, "edp": 1, "ep": 64, "etp": 1}
        assert world.axis("ep").size == 64
        assert (world.axis("ep inside").size, world.axis("ep nodes").size) == (8, 8)


def test_smallest_worlds_shrink_when_experts_fold_onto_dense_ranks():
    """tp 4 x cp 8 with ep 8: unfolded, ep multiplies (256 ranks); folded, the same 32 ranks serve both."""
    assert not broken_rules(
        ConfigOnRanks(shrink_config(replace(base(), parallel=ParallelConfig(tp=4, cp=8, ep=8)), 32), 32)
    )


WITHIN_DOCUMENTS = [
    ParallelConfig(tp=2, cp=2, ep=4, dispatcher="dedup", context="all_gather"),
    ParallelConfig(cp=4, ep=2, etp=2, dispatcher="all_to_all", context="all_to_all"),
    ParallelConfig(tp=4, ep=8, dispatcher="hierarchical"),
]


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "gpt-oss-20b-tiny"])
def test_attention_within_documents_agrees_with_one_rank(name: str):
    """Latents and tokens ahead; windows and sinks."""
    config = PRESETS[name]()
    config = replace(config, data=replace(config.data, attend="document"))
    found = differences([(in_fp64(config, parallel), "learned") for parallel in WITHIN_DOCUMENTS])
    assert not found, "\n".join(found)
