"""The chosen mechanism of context parallelism is legal, and no other one makes the simulated step shorter."""

import pytest

from moefold.config.rules import ConfigOnRanks, broken_rules
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.search import search_layouts
from moefold.plan.time.cheapest_context import MECHANISMS, cheapest_context, with_context
from moefold.plan.time.simulate_step import time_training_step
from moefold.presets.recipe import resolve_recipe

GPU = find_gpu_by_name("h100")
CHOICES = PlanChoices()
CASES = [  # recipe, ranks, tp, cp, length
    ("qwen3-30b-a3b", 8, 1, 4, 65536),
    ("qwen3-30b-a3b", 8, 1, 4, 8192),
    ("deepseek-v3", 32, 1, 32, 8192),
    ("deepseek-v3", 32, 2, 16, 131072),
    ("gpt-oss-20b", 16, 1, 16, 32768),
]


def configured(recipe: str, ranks: int, tp: int, cp: int, length: int):
    words = [f"--parallel.tp={tp}", f"--parallel.cp={cp}", f"--data.seq_len={length}"]
    return resolve_recipe(recipe, [*words, "--train.micro_batch=1", "--train.global_batch=64"], ranks)


def test_the_chosen_mechanism_is_legal_and_makes_the_shortest_step():
    chosen = set[str]()
    for recipe, ranks, tp, cp, length in CASES:
        config = configured(recipe, ranks, tp, cp, length)
        name = cheapest_context(config, CHOICES, GPU, ranks)
        seconds: dict[str, float] = {}
        for mechanism in MECHANISMS:
            candidate = with_context(config, mechanism)
            if not broken_rules(ConfigOnRanks(candidate, ranks)):
                setting = build_run_setting(candidate, ranks, CHOICES)
                seconds[mechanism] = time_training_step(setting, GPU).seconds
        assert seconds[name] == pytest.approx(min(seconds.values()), rel=1e-6), (recipe, name, seconds)
        chosen.add(name)
    assert len(chosen) > 1, "the cases differ"


def test_a_search_takes_the_cheapest_mechanism_unless_one_is_set():
    config = configured("deepseek-v3", 32, 1, 32, 8192)
    degrees = frozenset(f"parallel.{name}" for name in ("tp", "cp", "pp", "ep", "etp"))
    best = cheapest_context(config, CHOICES, GPU, 32)
    assert best != "all_gather"
    for name, fixed in ((best, degrees), ("all_gather", degrees | {"parallel.context"})):
        found = search_layouts(with_context(config, "all_gather"), 32, CHOICES, GPU, fixed)
        tried = [layout.config for layout in found.layouts] or [found.refusals.nearest.config]  # pyright: ignore
        assert {each.parallel.context for each in tried} == {name}
