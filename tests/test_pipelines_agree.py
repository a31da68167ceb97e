"""Every pipeline gives what one rank gives, to the bit where the order of sums is unchanged, and runs in the order that
was simulated.

On one data-parallel rank a stage adds its microbatches' gradients in their order, as an unpipelined run does, so the
bits are equal. Two sums have another order: those over ranks, and that of an embedding of which several stages hold
copies (over microbatches first, then over stages). They agree to 1e-12.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.anatomy.stage_contents import (
    layout_letters,
    pair_kind,
    pipeline_layout,
    pipeline_program,
    rank_of_each_stage,
)
from moefold.config.rules import check_config
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.observe.trace import TraceEvent
from moefold.presets.zoo import PRESETS
from moefold.schedule.program import Program, Slot, is_paired, last_stage_of
from moefold.schedule.schedule_catalog import SCHEDULES
from moefold.schedule.simulate_program import simulate_program
from moefold.schedule.stage_costs import uniform_costs
from moefold.schedule.stage_layout import StageLayout
from moefold.train.assemble import assemble_run
from moefold.train.parity import (
    TraceEntry,
    first_mismatch,
    random_corpus,
    shrink_config,
    skew_routing_biases,
    trace_one_step,
    trace_run,
)
from moefold.train.step import train_step
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks

TOLERANCE = 1e-12  # relative, where sums have another order


@dataclass(frozen=True)
class Case:
    """A pipeline, and what the names of all that may differ by rounding contain: "" stands for everything."""

    config: Config
    world: int
    routing: str = "learned"
    rounded: tuple[str, ...] = ("gradient norm",)

    def __str__(self) -> str:
        c, p = self.config.pipeline, self.config.parallel
        passes = " ".join([pair_kind(c), *(["defer"] if c.defer else [])])
        beside = " ".join(f"{k}{getattr(p, k)}" for k in ("tp", "cp", "ep", "etp") if getattr(p, k) > 1)
        each = self.config.train.global_batch // max(1, self.world // (p.pp * p.tp * p.cp))
        return f"{c.schedule} pp{p.pp} vpp{c.vpp} {each} microbatches {pipeline_layout(self.config)} {passes} {beside}"


def base(**moe: Any) -> Config:
    """Shared experts, a dense layer, biases, norms over all heads, both kinds of balance."""
    config = PRESETS["tiny"]()
    attention = replace(config.model.attention, qk_norm="full", qkv_bias=True, out_bias=True)
    experts = with_moe_keys(config.model.moe, **{"shared_ffn": 16, "dense_layers": 1, "aux_loss": 0.1, **moe})
    return replace(config, model=replace(config.model, attention=attention, moe=experts))


def case(
    start: Config,
    pipeline: PipelineConfig,
    microbatches: int,
    world: int,
    layers: int | None = None,
    rounded: Sequence[str] = (),
    routing: str = "learned",
    **parallel: Any,
) -> Case:
    """A pipeline at sizes of some milliseconds, in fp64. More than one rank beside it changes the order of all sums."""
    degrees = ParallelConfig(**parallel)
    train = replace(start.train, precision="fp64")
    small = shrink_config(replace(start, parallel=degrees, train=train, pipeline=replace(pipeline, layout="")), world)
    dp = world // (degrees.pp * degrees.tp * degrees.cp)
    model = replace(small.model, layers=layers or small.model.layers)
    train = replace(small.train, global_batch=dp * microbatches, micro_batch=1)
    config = replace(small, model=model, train=train, pipeline=pipeline)
    several = world > degrees.pp
    return Case(check_config(config, world), world, routing, ("",) if several else ("gradient norm", *rounded))


def unpipelined(config: Config) -> Config:
    """The same run and microbatches on one rank."""
    return replace(config, parallel=ParallelConfig(), pipeline=PipelineConfig())


Found = tuple[list[TraceEntry], list[list[TraceEvent]]]


def see(world: World, cases: list[Case], steps: int) -> list[Found]:
    """What this rank sees of each case, and what it did when in each step."""
    found = []
    for each in cases:
        config = each.config
        here = create_world(world.rank, world.size, world.device, config.parallel, node_size=4)
        run = assemble_run(config, here, Path("."), corpus=random_corpus(config))
        skew_routing_biases(run, each.routing)
        seen, events = [], []
        for _ in range(steps):
            run.executor.spans.start_recording()
            seen += trace_one_step(run)
            events.append(list(run.executor.spans.events))
        found.append((seen, events))
    return found


def rounded_apart(case: Case, whole: Sequence[TraceEntry], ranks: Iterable[Sequence[TraceEntry]]) -> list[str]:
    """The names of what is not equal to the bit, though it should be."""
    reference = {seen.what: seen.values for seen in whole}
    wrong = []
    for seen in itertools.chain(*ranks):
        place = tuple(slice(s, s + n) for s, n in zip(seen.starts, seen.values.shape, strict=True))
        free = any(name in seen.what for name in case.rounded)
        if not free and not torch.equal(reference[seen.what][place], seen.values):
            wrong.append(seen.what)
    return sorted(set(wrong))


def out_of_order(events: Sequence[TraceEvent], slots: Sequence[Slot]) -> str:
    """How what a rank did differs from its part of the program; in a paired slot F and D may be in any order."""
    places: dict[str, tuple[int, int]] = {}
    for number, slot in enumerate(slots):
        for at, op in enumerate(slot):
            if not (is_paired(slot) and op.kind == "W"):  # it fills gaps there
                places[str(op)] = (number, 0 if is_paired(slot) else at)
    names = [e.name.split()[-1] for e in sorted(events, key=lambda e: e.start) if e.name not in ("weights", "wait")]
    if strangers := set(names) - set(places):
        return f"it did {sorted(strangers)}, which the program does not ask for"
    did = [places[name] for name in names]
    if did != sorted(did):
        return f"it did {names}"
    missing = set(places) - set(names)
    return f"it did not do {sorted(missing)}" if missing else ""


def simulated(program: Program) -> list[list[Slot]]:
    """By rank, the slots in the order in which the simulator clocks them."""
    spans = sorted(
        simulate_program(program, uniform_costs(last_stage_of(program) + 1)).spans, key=lambda span: span.start
    )
    return [[span.slot for span in spans if span.rank == rank] for rank in range(len(program))]


def disagreements(cases: list[Case], steps: int = 1, by_rank: list[list[Found]] | None = None) -> list[str]:
    """Everything in which a case differs from one rank, or from the order that was simulated."""
    (world,) = {each.world for each in cases}
    by_rank = by_rank or run_ranks(see, world, cases, steps)
    found = []
    for number, each in enumerate(cases):
        config = each.config
        traces = [rank[number][0] for rank in by_rank]
        whole = trace_run(unpipelined(config), single_rank_world(), steps, each.routing)
        if difference := first_mismatch(whole, traces, TOLERANCE):
            found.append(f"{each}: {difference}")
        if wrong := rounded_apart(each, whole, traces):
            found.append(f"{each}: not the same bits: {wrong[:4]} and {len(wrong)} in all")
        if config.model.moe.balance.aux_over == "global_batch":
            continue  # its survey is a pass of its own
        order = simulated(program_of_case(each))
        for rank in range(world):
            here = rank * len(order) // world
            for events in by_rank[rank][number][1]:
                if amiss := out_of_order(events, order[here]):
                    found.append(f"{each}: rank {rank}: {amiss}")
    return found


def program_of_case(each: Case) -> Program:
    c = each.config
    dp = each.world // (c.parallel.pp * c.parallel.tp * c.parallel.cp)
    return pipeline_program(c, c.train.global_batch // (dp * c.train.micro_batch))


def some_layout(config: Config, seed: int) -> str:
    """An uneven cut at random places; the embedding or the loss may lie alone."""
    pieces, count = layout_letters(config.model), config.parallel.pp * config.pipeline.vpp
    bounds = [0, *sorted(random.Random(seed).sample(range(1, len(pieces)), count - 1)), len(pieces)]
    return str(StageLayout(tuple(pieces[a:b] for a, b in itertools.pairwise(bounds))))


def unevenly(each: Case, seed: int) -> Case:
    c = each.config
    layout = some_layout(c, seed)
    return replace(each, config=check_config(replace(c, pipeline=replace(c.pipeline, layout=layout)), each.world))


ALL = [
    (name, pp, vpp)
    for name, schedule in SCHEDULES.items()
    for pp in (2, 4)
    for vpp in (1, 2, 3)
    if schedule.accepts_vpp(vpp)
]


def alone_in_data(pp: int) -> list[Case]:
    """Every schedule and vpp on as many ranks as stages need; microbatch counts, layouts and passes take turns."""
    counts, passes = itertools.cycle([5, 3, 1, 6, 2]), itertools.cycle([{}, {"defer": True}, {}])
    found = []
    for seed, (name, _, vpp) in enumerate(each for each in ALL if each[1] == pp):
        made = case(
            base(), PipelineConfig(name, vpp, **next(passes)), next(counts), pp, layers=max(3, pp * vpp - 1), pp=pp
        )
        found.append(unevenly(made, seed) if seed % 3 else made)
    return found


@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_and_vpp_has_the_bits_of_one_rank_and_the_simulated_order(pp: int):
    found = disagreements(alone_in_data(pp))
    assert not found, "\n".join(found)


PAIRED = [
    ("1f1b", 2, 1, 5, {}),
    ("1f1b", 2, 3, 3, {}),
    ("interleaved", 2, 2, 6, {"fill": False}),
    ("zb_h1", 2, 2, 5, {}),
    ("gpipe", 2, 1, 3, {}),
    ("1f1b", 2, 1, 4, {"defer": True}),
    ("interleaved", 2, 2, 3, {"defer": True, "fill": False}),
    ("zb_v", 2, 2, 4, {}),
    ("dualpipe_v", 2, 2, 5, {"fill": False}),
]


@pytest.mark.extended
def test_pairing_a_forward_with_a_backward_keeps_the_bits_of_one_rank():
    """Woven, each microbatch's sums still have their own order."""
    cases = [
        unevenly(case(base(), PipelineConfig(name, vpp, pair=True, **more), m, 2, layers=6, pp=pp), seed)
        for seed, (name, pp, vpp, m, more) in enumerate(PAIRED)
    ]
    assert all(any(is_paired(slot) for slots in program_of_case(each) for slot in slots) for each in cases)
    found = disagreements(cases)
    assert not found, "\n".join(found)


ALIKE: dict[str, Any] = {"pair": True, "pairs": "alike"}
IN_STEP = [
    ("1f1b", 1, 1, 5, {}),
    ("1f1b", 2, 1, 5, {"fill": False}),
    ("interleaved", 2, 2, 6, {}),
    ("zb_h1", 2, 2, 5, {}),
    ("gpipe", 2, 1, 3, {"fill": False}),
    ("1f1b", 2, 1, 8, {"defer": True}),
    ("zb_v", 2, 2, 8, {}),
]


@pytest.mark.extended
def test_two_microbatches_in_step_keep_the_bits_of_one_rank():
    for pp in (1, 2):
        cases = [
            unevenly(case(base(), PipelineConfig(name, vpp, **ALIKE, **more), m, pp, layers=6, pp=pp), 5)
            for name, ranks, vpp, m, more in IN_STEP
            if ranks == pp
        ]
        assert all(any(is_paired(slot) for slots in program_of_case(each) for slot in slots) for each in cases)
        found = disagreements(cases)
        assert not found, "\n".join(found)


BESIDE: list[dict[str, Any]] = [
    {"ep": 2, "dispatcher": "all_to_all"},
    {"tp": 2},
    {"ep": 2, "tp": 2, "dispatcher": "dedup"},
    {"cp": 2, "context": "ring"},
    {"etp": 2},
    {"ep": 2, "cp": 2, "context": "all_gather", "dispatcher": "all_gather"},
]


@pytest.mark.extended
def test_every_schedule_and_vpp_agrees_with_one_rank_with_expert_and_tensor_parallelism_beside_it():
    """On 4 ranks in 2 stages and more, with two ranks a stage that share experts, heads, sequences or nothing."""
    beside, passes = itertools.cycle(BESIDE), itertools.cycle([{}, {"pair": True}, {"defer": True}, ALIKE])
    counts, routings = itertools.cycle([3, 1, 5, 2]), itertools.cycle(["learned", "empty experts", "one expert"])
    cases = []
    for seed, (name, pp, vpp) in enumerate(each for each in ALL if each[1] == 2):
        pipeline = PipelineConfig(name, vpp, **next(passes))
        made = case(
            base(), pipeline, next(counts), 4, layers=2 * vpp + 1, routing=next(routings), pp=pp, **next(beside)
        )
        cases.append(unevenly(made, seed) if seed % 2 else made)
    found = disagreements(cases)
    assert not found, "\n".join(found)


EIGHT: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("1f1b", 1, {"pair": True}, {"pp": 2, "ep": 4, "tp": 2, "dispatcher": "all_to_all"}),
    ("dualpipe_v", 2, {}, {"pp": 2, "ep": 2, "etp": 2, "tp": 2}),
    ("interleaved", 3, {"pair": True, "defer": True}, {"pp": 4, "ep": 2, "dispatcher": "dedup"}),
    ("1f1b", 2, ALIKE, {"pp": 2, "ep": 4, "tp": 2, "dispatcher": "all_to_all"}),
    ("zb_v", 2, {}, {"pp": 4, "tp": 2}),
    ("zb_h1", 2, {}, {"pp": 2, "cp": 2, "tp": 2, "ep": 2, "dispatcher": "all_gather"}),
]


@pytest.mark.extended
def test_eight_ranks_in_two_or_four_stages_agree_with_one_rank():
    cases = [
        unevenly(case(base(), PipelineConfig(name, vpp, **more), 3, 8, layers=max(4, beside["pp"] * vpp), **beside), i)
        for i, (name, vpp, more, beside) in enumerate(EIGHT)
    ]
    found = disagreements(cases)
    assert not found, "\n".join(found)


SHARED = ("gradient embedding.weight", "weight embedding.weight", "step 2: ")  # what follows from it is rounded too


def looking_ahead(tied: bool = False, mtp: int = 1) -> Config:
    config = PRESETS["deepseek-v3-tiny"]()
    return replace(config, model=replace(config.model, mtp=mtp, tied_head=tied))


AHEAD: list[tuple[Config, int, PipelineConfig]] = [
    (looking_ahead(), 2, PipelineConfig()),
    (looking_ahead(), 2, PipelineConfig("1f1b", 2, layout="Et|tt|tm|L")),
    (looking_ahead(), 4, PipelineConfig("zb_h1", layout="E|tt|tt|mL")),
    (looking_ahead(mtp=2), 2, PipelineConfig("1f1b", 2, layout="Ett|t|tm|mL", pair=True)),
    (looking_ahead(mtp=2), 4, PipelineConfig("1f1b", layout="Ettt|tm|m|L", pair=True, defer=True)),
    (looking_ahead(mtp=2), 4, PipelineConfig("interleaved", 2, layout="E|t|t|t|t|m|m|L")),
    (looking_ahead(mtp=2), 2, PipelineConfig("dualpipe_v", 2, layout="Et|ttt|m|mL")),
    (looking_ahead(mtp=2), 2, PipelineConfig("zb_v", 2, layout="Etttt|m|m|L")),
    (looking_ahead(True, mtp=2), 4, PipelineConfig("1f1b", layout="Ett|tt|mm|L")),
]


@pytest.mark.extended
def test_layers_that_look_ahead_agree_wherever_they_lie_though_stages_share_the_embedding():
    for pp in (2, 4):
        cases = [
            case(start, pipeline, 3, pp, layers=4, rounded=SHARED, pp=pp)
            for start, ranks, pipeline in AHEAD
            if ranks == pp
        ]
        found = disagreements(cases, steps=2)
        assert not found, "\n".join(found)


def tied(**moe: Any) -> Config:
    config = base(**moe)
    return replace(config, model=replace(config.model, tied_head=True))


TIED = [
    (PipelineConfig(), {"pp": 4}),
    (PipelineConfig("1f1b", 2), {"pp": 2, "ep": 2}),
    (PipelineConfig("dualpipe_v", 2), {"pp": 2, "tp": 2}),
    (PipelineConfig("zb_h1", pair=True), {"pp": 2, "cp": 2}),
]


@pytest.mark.extended
def test_a_tied_head_has_one_gradient_and_its_copies_stay_equal_to_the_bit():
    cases = [case(tied(), pipeline, 3, 4, layers=4, rounded=SHARED, **degrees) for pipeline, degrees in TIED]
    by_rank = run_ranks(see, 4, cases, 2)
    found = disagreements(cases, steps=2, by_rank=by_rank)
    assert not found, "\n".join(found)
    for number, each in enumerate(cases):
        homes = rank_of_each_stage(each.config)
        for what in ("weight", "gradient"):
            copies: dict[tuple[int, ...], list[torch.Tensor]] = {}
            for rank in range(4):
                for seen in by_rank[rank][number][0]:
                    if seen.what == f"step 2: {what} embedding.weight":
                        copies.setdefault(seen.starts, []).append(seen.values)
            assert copies
            for values in copies.values():
                assert len(values) >= len({homes[0], homes[-1]}), each
                assert all(torch.equal(values[0], other) for other in values), f"{each}: {what}"


BALANCE: list[tuple[dict[str, Any], PipelineConfig, dict[str, Any]]] = [
    ({"aux_over": "global_batch"}, PipelineConfig("1f1b", 2), {"pp": 4}),
    ({"aux_over": "global_batch"}, PipelineConfig("zb_v", 2), {"pp": 4}),
    ({"aux_over": "global_batch"}, PipelineConfig("1f1b", pair=True), {"pp": 2, "ep": 2}),
    ({"aux_over": "previous_batch"}, PipelineConfig("dualpipe_v", 2), {"pp": 2, "tp": 2}),
    ({"aux_over": "microbatch"}, PipelineConfig("1f1b", defer=True), {"pp": 4}),
    ({"device_loss": 0.5, "devices": 4, "z_loss": 0.01}, PipelineConfig("1f1b", 2, pair=True), {"pp": 4}),
    ({"latent": 8}, PipelineConfig("1f1b", pair=True), {"pp": 2, "ep": 2}),
    ({"biases": True, "activation": "relu2", "shared_ffn": 16}, PipelineConfig("zb_h1", pair=True), {"pp": 4}),
    ({"biases": True, "activation": "clamped_swiglu", "clamp": 0.02}, PipelineConfig("zb_h1", pair=True), {"pp": 4}),
]


def test_every_stage_attends_within_documents():
    """Latents, and a layer that looks ahead."""
    start = replace(PRESETS["deepseek-v3-tiny"](), data=replace(base().data, attend="document"))
    cases = [
        case(start, PipelineConfig(*schedule), 3, 4, layers=4, **beside)
        for schedule, beside in [
            (("1f1b", 1), {"pp": 2, "cp": 2, "context": "all_gather"}),
            (("zb_v", 2), {"pp": 2, "tp": 2, "ep": 2}),
        ]
    ]
    found = disagreements(cases)
    assert not found, "\n".join(found)


@pytest.mark.extended
def test_every_balance_loss_agrees_in_a_pipeline_the_one_over_the_global_batch_too():
    cases = [case(base(**moe), pipeline, 3, 4, layers=7, **degrees) for moe, pipeline, degrees in BALANCE]
    found = disagreements(cases, steps=2)
    assert not found, "\n".join(found)


def left_under_way(world: World, each: Case) -> list[str]:
    """Weights that a step used though the ranks that updated them might not have handed them over yet."""
    run = assemble_run(each.config, world, Path("."), corpus=random_corpus(each.config))
    train_step(run, run.loader.next_batch())
    assert run.parameters.under_way, "several ranks update each weight"
    parts = list(run.loader.next_batch().microbatches(1))
    run.executor.forward_only(parts, lambda carry: run.model.predict(carry) and None)
    return [p.name for number in run.parameters.under_way for p in run.parameters.buckets[number].parameters]


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_every_stage_waits_for_the_weights_it_uses(is_tied: bool):
    each = case(tied() if is_tied else base(), PipelineConfig(), 2, 4, layers=2, pp=2)
    assert run_ranks(left_under_way, 4, each, pp=2) == [[]] * 4


def test_the_grid_has_every_schedule_vpp_and_uneven_counts_and_layouts():
    cases = [*alone_in_data(2), *alone_in_data(4)]
    assert {(c.config.pipeline.schedule, c.config.parallel.pp, c.config.pipeline.vpp) for c in cases} == set(ALL)
    counts = {c.config.train.global_batch % c.config.parallel.pp for c in cases}
    assert counts >= {1, 2, 3}, "microbatches that are no multiple of pp"
    lengths = [{len(pieces) for pieces in pipeline_layout(c.config).stages} for c in cases]
    assert sum(len(each) > 1 for each in lengths) > len(cases) / 2, "stages of several lengths"
