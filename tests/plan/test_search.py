"""What a search finds is legal, fits, and is the best of what it looked at; closed forms agree with the clock."""

from dataclasses import replace
from statistics import mean

import pytest

from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.plan.launch import with_planned_memory
from moefold.plan.machine.gpu import Gpu, find_gpu_by_name
from moefold.plan.memory.peak_memory import GIB, build_run_setting, fullest_rank, memory_by_rank
from moefold.plan.options import RECOMPUTE_LADDER, PlanChoices
from moefold.plan.request import with_dispatcher
from moefold.plan.search import (
    NO_RUNGS,
    Candidate,
    LayoutRungs,
    LayoutSearch,
    RankedLayout,
    describe_layout,
    search_layouts,
)
from moefold.plan.time.simulate_step import time_training_step
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS, is_published_model

H100 = find_gpu_by_name("h100")
H200 = find_gpu_by_name("h200")


def found(model: str, world: int, *words: str, fixed: frozenset[str] = frozenset(), choices: PlanChoices | None = None):
    config = resolve_recipe(model, [f"--train.global_batch={8 * world}", *words], None)
    return search_layouts(config, world, choices or PlanChoices(), H100, fixed, best=5)


@pytest.fixture(scope="module")
def qwen():
    return found("qwen3-30b-a3b", 32)


def test_layouts_are_legal_and_fit(qwen):
    assert len(qwen.layouts) == 5
    for each in qwen.layouts:
        assert not broken_rules(ConfigOnRanks(each.config, 32))
        assert each.largest_gib < H100.memory


def test_best_comes_first_and_the_front_only_trades(qwen):
    times = [each.seconds for each in qwen.layouts]
    assert times == sorted(times)
    gibs, rates = [each.largest_gib for each in qwen.pareto_front], [1 / each.seconds for each in qwen.pareto_front]
    assert gibs == sorted(gibs, reverse=True)
    assert rates == sorted(rates, reverse=True)


def test_the_front_is_simulated(qwen):
    """Time and memory of every layout on the front are those of a plan of that layout alone."""
    assert len(qwen.pareto_front) > 3
    for each in qwen.pareto_front:
        config, _ = with_dispatcher(each.config, each.choices, H100, 32)
        setting = build_run_setting(config, 32, each.choices)
        assert each.seconds == pytest.approx(time_training_step(setting, H100).seconds)
        assert each.largest_gib == pytest.approx(fullest_rank(memory_by_rank(setting)).needed / GIB)


def test_nothing_that_fits_is_faster_or_smaller_than_what_is_shown():
    """Of all candidates of a small search, each simulated, with recompute where it does not fit without."""
    fixed = frozenset({"parallel.tp", "parallel.cp", "parallel.etp", "train.micro_batch"})
    words = ["--train.global_batch=128", "--train.micro_batch=1"]
    base = resolve_recipe("qwen3-30b-a3b", words, None)
    result = search_layouts(base, 16, PlanChoices(), H100, fixed, best=10)
    search = LayoutSearch(16, H100, PlanChoices(), fixed)
    everything: list[RankedLayout] = []
    for candidate in search.feasible_candidates(base):
        rung: Candidate | None = candidate
        while rung and not (layout := search.rank_candidate(rung)):
            rung = search.next_rung(rung)
        if rung and layout:
            everything.append(layout)
    times = sorted(each.seconds for each in everything)
    assert [each.seconds for each in result.layouts] == pytest.approx(times[:10])
    assert result.pareto_front[-1].largest_gib < min(each.largest_gib for each in everything) + 0.5


def test_what_is_left_out_has_a_reason(qwen):
    counts = qwen.refusals.counts
    assert counts["memory"] > 0
    assert set(counts) == set(qwen.refusals.examples)
    assert "GiB" in qwen.refusals.examples["memory"]


def test_what_the_user_sets_stays():
    fixed = frozenset({"parallel.tp", "parallel.pp", "train.micro_batch"})
    result = found("qwen3-30b-a3b", 32, "--parallel.tp=2", "--parallel.pp=2", "--train.micro_batch=2", fixed=fixed)
    for each in result.layouts:
        assert (each.config.parallel.tp, each.config.parallel.pp, each.config.train.micro_batch) == (2, 2, 2)


def test_rules_are_named_where_they_forbid():
    fixed = frozenset({"parallel.tp", "parallel.pp"})
    result = found("qwen3-30b-a3b", 48, "--parallel.tp=3", fixed=fixed)
    assert not result.layouts
    assert "tp splits model.attention.heads" in result.refusals.counts


WORLDS = {"deepseek-v3": 1024, "kimi-k2": 1024, "deepseek-v2": 256, "qwen3-235b-a22b": 256, "mixtral-8x22b": 128}
WORLDS |= {"mixtral-8x22b-g8t8": 128, "internal-352b": 512, "hunyuan-large": 512, "llama3-8x70b": 512}
MODELS = list(filter(is_published_model, PRESETS))
SAMPLED = 8
ONE_LAYOUT = frozenset(f"parallel.{name}" for name in ("tp", "cp", "pp", "ep", "etp"))
ONE_LAYOUT |= {"pipeline.vpp", "pipeline.pair", "train.micro_batch"}
OF_OVERLAP = frozenset({"parallel.tp", "parallel.cp", "parallel.etp", "pipeline.pair", "recompute"})


@pytest.mark.parametrize("pair", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_closed_forms_are_close_lower_bounds_of_time_and_memory(model: str, pair: bool):
    """Ranking by a bound that is too high would pass over layouts; by one that is far too low, it would simulate
    many."""
    world = WORLDS.get(model, 32)
    words = [f"--train.global_batch={8 * world}", f"--pipeline.pair={pair}", "--optim.moments=bf16"]
    base = resolve_recipe(model, words, None)
    choices = PlanChoices(recompute=("layer",) if world > 32 else ())
    search = LayoutSearch(world, H200, choices, OF_OVERLAP)
    candidates = sorted(search.feasible_candidates(base), key=lambda candidate: candidate.seconds)
    sample = candidates[:SAMPLED] + candidates[SAMPLED :: max(1, len(candidates) // SAMPLED)]
    off_time: list[float] = []
    off_memory: list[float] = []
    for candidate in sample:
        config = search.with_chosen_dispatcher(candidate.config)
        setting = build_run_setting(config, world, candidate.choices)
        exact = time_training_step(setting, H200).seconds
        needed = fullest_rank(memory_by_rank(setting)).needed / GIB
        off_time.append(candidate.seconds / exact - 1)
        off_memory.append(candidate.gib / needed - 1)
    assert max(off_time) < 1e-9
    assert min(off_time) > -0.18
    assert mean(off_time) > -0.06
    assert max(off_memory) < 0.001
    assert min(off_memory) > -0.15


def test_a_paired_layout_is_priced_as_the_simulator_does():
    """Qwen3-30B on 16 H100, pp 2, vpp 8, ep 8: once 19 % too fast."""
    layout = ["--parallel.pp=2", "--parallel.ep=8", "--pipeline.vpp=8", "--pipeline.pair=true", "--train.micro_batch=1"]
    base = resolve_recipe("qwen3-30b-a3b", [*layout, "--train.global_batch=128"], 16)
    search = LayoutSearch(16, H100, PlanChoices(), ONE_LAYOUT)
    (candidate,) = search.feasible_candidates(base)
    simulated = search.rank_candidate(candidate)
    assert simulated
    assert candidate.seconds == pytest.approx(simulated.seconds, rel=0.03)


def rungs_of(words: list[str], gpu: Gpu) -> LayoutRungs:
    layout = ["--parallel.ep=8", "--train.micro_batch=2", "--train.global_batch=64"]
    base = resolve_recipe("gpt-oss-20b", [*layout, *words], 8)
    search = LayoutSearch(8, gpu, PlanChoices(), ONE_LAYOUT)
    return LayoutRungs(search, base)


SAR = RECOMPUTE_LADDER.index(("sar",))


def test_selective_rematerialisation_is_proposed_where_it_is_the_cheapest_that_fits():
    """GPT-OSS-20B on 8 H100."""
    layout = rungs_of([], H100)
    found = layout.search.fit_with_recompute(layout.config)
    assert found
    assert found.rung == SAR
    assert not any(map(layout.fits, range(SAR)))
    more = [layout.candidate(rung, NO_RUNGS) for rung in range(SAR + 1, len(RECOMPUTE_LADDER)) if layout.fits(rung)]
    assert more
    assert found.seconds < min(candidate.seconds for candidate in more)
    run = with_planned_memory(found.config, found.choices)
    assert set(run.memory.recompute) == {"norm", "swap", "dispatch", "activation"}
    assert not broken_rules(ConfigOnRanks(run, 8))
    after = layout.search.next_rung(found)
    assert after
    assert after.rung > SAR


def test_selective_rematerialisation_is_refused_where_the_trainer_refuses_it():
    """Fully sharded, on a GPU on which it would be the first to fit."""
    shared_out = ["--shard.mode=zero3"]
    needed = rungs_of(shared_out, H100).measure(SAR).gib
    layout = rungs_of(shared_out, replace(H100, memory=needed))
    found = layout.search.fit_with_recompute(layout.config)
    assert found
    assert found.rung > SAR
    rule = "tokens that are dispatched again are normed with whole weights"
    examples = layout.search.refusals.examples
    assert "shard.mode = zero3" in examples[f"recompute sar: {rule}"]


def test_of_rungs_of_which_none_contains_the_other_the_faster_is_taken():
    """Over slow links between nodes a second dispatch takes longer than the latents' projections up."""
    links = replace(H100, network=H100.network / 100)
    base = resolve_recipe(
        "deepseek-v2-lite", ["--parallel.ep=16", "--train.global_batch=128", "--train.micro_batch=4"], 16
    )
    search = LayoutSearch(16, links, PlanChoices(), ONE_LAYOUT)
    needed = LayoutRungs(search, base).measure(SAR).gib
    search = LayoutSearch(16, replace(links, memory=needed), PlanChoices(), ONE_LAYOUT)
    found = search.fit_with_recompute(base)
    assert found
    assert found.choices.recompute == ("activation", "norm", "up", "mlp")


def test_without_recompute_memory_of_uneven_stages_is_near():
    """Mixtral, pp 2, vpp 12, ep 8: its 34 pieces do not divide by 24 stages; once 16 % too low."""
    layout = ["--parallel.pp=2", "--parallel.ep=8", "--pipeline.vpp=12", "--train.micro_batch=1"]
    base = resolve_recipe("mixtral-8x7b", [*layout, "--train.global_batch=256"], 32)
    search = LayoutSearch(32, H100, PlanChoices(), ONE_LAYOUT)
    (candidate,) = search.feasible_candidates(base)
    simulated = search.rank_candidate(candidate)
    assert simulated
    assert candidate.gib == pytest.approx(simulated.largest_gib, rel=0.05)


@pytest.mark.extended
@pytest.mark.slow
def test_the_published_best_layout_is_among_the_best():
    """000 Table 17: DeepSeek-V3 on 1,024 H100: TP2 PP8 VPP4 EP64, overlap, moments in bf16, FP8 by blocks."""
    choices = PlanChoices(stack="megatron", precision="fp8-blockwise", spread=0.0)
    result = found("deepseek-v3", 1024, "--optim.moments=bf16", choices=choices)
    assert result.layouts_tried > 5000
    best = [describe_layout(each.config) for each in result.layouts]
    assert "tp 2, pp 8, vpp 4, ep 64, mbs 1, overlap" in best
