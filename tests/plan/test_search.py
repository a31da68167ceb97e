"""What a search finds is legal, fits, and is the best of what it looked at; closed forms agree with the clock."""

from statistics import mean

import pytest

from moefold.config.rule import Case
from moefold.config.rules import broken
from moefold.plan.choices import Choices
from moefold.plan.comm import Cluster
from moefold.plan.estimate import cut_of, held_of, largest_gib, plain_setting, price_of, step_seconds
from moefold.plan.hardware import find_gpu
from moefold.plan.memory import GIB, memory_of, setting_of, worst
from moefold.plan.search import Search, described, search
from moefold.plan.simulate import time_step
from moefold.plan.timing import Pace
from moefold.presets.recipe import resolve

H100 = find_gpu("h100")


def found(model: str, world: int, *words: str, fixed: frozenset[str] = frozenset(), choices: Choices | None = None):
    config = resolve(model, [f"--train.global_batch={8 * world}", *words], None)
    return search(config, world, choices or Choices(), H100, fixed, best=5)


@pytest.fixture(scope="module")
def qwen():
    return found("qwen3-30b-a3b", 32)


def test_layouts_are_legal_and_fit(qwen):
    assert len(qwen.layouts) == 5
    for each in qwen.layouts:
        assert not broken(Case(each.config, 32))
        assert each.gib < H100.memory


def test_best_comes_first_and_the_front_only_trades(qwen):
    times = [each.time.seconds for each in qwen.layouts]
    assert times == sorted(times)
    gibs, rates = [gib for gib, _, _ in qwen.front], [rate for _, rate, _ in qwen.front]
    assert gibs == sorted(gibs, reverse=True)
    assert rates == sorted(rates, reverse=True)


def test_nothing_it_looked_at_is_faster_and_fits(qwen):
    """The closed form may be a few per cent off; beyond that nothing better was passed over."""
    looking = Search(32, H100, Choices(), frozenset())
    base = resolve("qwen3-30b-a3b", ["--train.global_batch=256"], None)
    fastest = min(each.seconds for each in looking.candidates(base) if each.gib < 0.9 * H100.memory)
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
    choices = Choices(recompute=("norm", "activation"))
    config = resolve(model, [*words.split(), f"--train.global_batch={8 * world}", "--train.micro_batch=1"], world)
    s, cut = plain_setting(config, world, choices), cut_of(config)
    pace = Pace(s, H100)
    prices, held = {k: price_of(pace, k) for k in cut.kinds}, {k: held_of(s, k) for k in cut.kinds}
    exact = setting_of(config, world, choices)
    return (
        step_seconds(s, Cluster(H100, world), cut, prices, held),
        time_step(exact, H100).seconds,
        largest_gib(s, cut, held),
        worst(memory_of(config, world, choices)).total / GIB,
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
    choices = Choices(stack="megatron", precision="fp8-blockwise", spread=0.0)
    result = found("deepseek-v3", 1024, "--optim.moments=bf16", choices=choices)
    assert result.looked > 5000
    best = [described(each.config) for each in result.layouts]
    assert "tp 2, pp 8, vpp 4, ep 64, mbs 1, overlap" in best
