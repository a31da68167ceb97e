"""What a search finds is legal, fits, and is the best of what it looked at; closed forms agree with the clock."""

from statistics import mean

import pytest

from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import GIB, build_run_setting, fullest_rank, plan_memory
from moefold.plan.options import PlanChoices
from moefold.plan.search import LayoutSearch, describe_layout, search_layouts
from moefold.plan.time.closed_form import (
    closed_form_setting,
    cut_pipeline,
    estimate_step_seconds,
    largest_rank_gib,
    measure_piece_memory,
    price_piece,
)
from moefold.plan.time.simulate_step import time_training_step
from moefold.plan.time.step_times import StepClock
from moefold.presets.recipe import resolve_recipe

H100 = find_gpu_by_name("h100")


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
    times = [each.time.seconds for each in qwen.layouts]
    assert times == sorted(times)
    gibs, rates = [gib for gib, _, _ in qwen.pareto_front], [rate for _, rate, _ in qwen.pareto_front]
    assert gibs == sorted(gibs, reverse=True)
    assert rates == sorted(rates, reverse=True)


def test_nothing_it_looked_at_is_faster_and_fits(qwen):
    """The closed form may be a few per cent off; beyond that nothing better was passed over."""
    looking = LayoutSearch(32, H100, PlanChoices(), frozenset())
    base = resolve_recipe("qwen3-30b-a3b", ["--train.global_batch=256"], None)
    fastest = min(each.seconds for each in looking.feasible_candidates(base) if each.largest_gib < 0.9 * H100.memory)
    assert qwen.layouts[0].time.seconds < 1.07 * fastest


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


LAYOUTS = [
    ("deepseek-v3", 256, "--parallel.pp=8 --pipeline.vpp=4 --parallel.ep=32"),
    ("deepseek-v3", 256, "--parallel.pp=4 --pipeline.vpp=4 --parallel.ep=64 --pipeline.pair=true"),
    ("qwen3-235b-a22b", 256, "--parallel.tp=2 --parallel.pp=8 --pipeline.vpp=4 --parallel.ep=32 --pipeline.pair=true"),
    ("qwen3-30b-a3b", 16, "--parallel.ep=16 --pipeline.pair=true"),
    ("mixtral-8x22b", 128, "--parallel.tp=2 --parallel.pp=8 --pipeline.vpp=7 --parallel.ep=8"),
    ("gpt-oss-120b", 64, "--parallel.pp=4 --parallel.ep=8"),
    ("qwen2-57b-a14b", 64, "--parallel.tp=2 --parallel.pp=4 --parallel.ep=4"),
]


def both(model: str, world: int, words: str) -> tuple[float, float, float, float]:
    """Closed form and exact: seconds, and GiB of the largest rank."""
    choices = PlanChoices(recompute=("norm", "activation"))
    config = resolve_recipe(
        model, [*words.split(), f"--train.global_batch={8 * world}", "--train.micro_batch=1"], world
    )
    s, cut = closed_form_setting(config, world, choices), cut_pipeline(config)
    pace = StepClock(s, H100)
    prices, held = {k: price_piece(pace, k) for k in cut.kinds}, {k: measure_piece_memory(s, k) for k in cut.kinds}
    exact = build_run_setting(config, world, choices)
    return (
        estimate_step_seconds(s, Cluster(H100, world), cut, prices, held),
        time_training_step(exact, H100).seconds,
        largest_rank_gib(s, cut, held),
        fullest_rank(plan_memory(config, world, choices)).total / GIB,
    )


def test_closed_forms_agree_with_the_clock_and_with_memory():
    results = [both(*each) for each in LAYOUTS]
    off = [abs(quick / exact - 1) for quick, exact, _, _ in results]
    assert max(off) < 0.07
    assert mean(off) < 0.03
    assert max(abs(quick / exact - 1) for _, _, quick, exact in results) < 0.12


@pytest.mark.slow
def test_the_published_best_layout_is_among_the_best():
    """000 Table 17: DeepSeek-V3 on 1,024 H100: TP2 PP8 VPP4 EP64, overlap, moments in bf16, FP8 by blocks."""
    choices = PlanChoices(stack="megatron", precision="fp8-blockwise", spread=0.0)
    result = found("deepseek-v3", 1024, "--optim.moments=bf16", choices=choices)
    assert result.layouts_tried > 5000
    best = [describe_layout(each.config) for each in result.layouts]
    assert "tp 2, pp 8, vpp 4, ep 64, mbs 1, overlap" in best
