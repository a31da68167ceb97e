"""Bounds of memory and time are below the plan whatever is trained: groups, frozen parameters, adapters, shares."""

from dataclasses import replace
from itertools import product
from statistics import mean

import pytest

from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import GIB, build_run_setting, fullest_rank, memory_by_rank, plan_memory
from moefold.plan.options import PlanChoices
from moefold.plan.search import Candidate, LayoutSearch, search_layouts
from moefold.plan.time.simulate_step import time_training_step
from moefold.presets.recipe import resolve_recipe

H100 = find_gpu_by_name("h100")
UNLIMITED = replace(H100, memory=1e9)
WORLD = 32
FIXED = frozenset(f"parallel.{name}" for name in ("tp", "cp", "pp", "ep", "etp"))
FIXED |= {"pipeline.vpp", "pipeline.pair", "train.micro_batch", "recompute"}
TRAINED = {
    "all": "",
    "no experts": "--optim.groups=*.moe.experts.*: frozen",
    "upper layers": "--optim.groups=blocks.?.*: frozen,blocks.1?.*: frozen,embedding.*: frozen",
    "head alone": "--optim.groups=head.*: lr=1,*: frozen",
    "Muon for experts": "--optim.groups=*.experts.*: rule=muon,*.router.*: frozen",
    "Muon": "--optim.rule=muon;--optim.groups=*.norm.*: frozen",
    "adapters": "--lora.rank=16",
    "adapters beside experts on the host": "--lora.rank=16;--memory.offload=expert_weights@3-30",
    "adapters beside blocks": "--lora.rank=16;--lora.base=nf4;--optim.rule=muon",
}
MODELS = ("qwen3-30b-a3b", "deepseek-v2-lite", "olmoe-1b-7b")
LAYOUTS = (
    "--parallel.ep=8",
    "--parallel.ep=4;--parallel.tp=2;--parallel.pp=2",
    "--parallel.ep=4;--parallel.pp=4;--pipeline.vpp=2;--pipeline.pair=true;--optim.moments=bf16",
    "--parallel.ep=8;--parallel.pp=2;--optim.states=host",
    "--parallel.ep=8;--train.global_batch=32;--optim.main=split",
    "--parallel.ep=2;--shard.mode=zero3",
)


def bound_of(model: str, words: str, search: LayoutSearch) -> Candidate | None:
    """The bounds of a layout; none where a rule refuses it."""
    base = [f"--train.global_batch={8 * WORLD}", "--train.micro_batch=1"]
    config = resolve_recipe(model, base + [word for word in words.split(";") if word], None)
    return next(search.feasible_candidates(config), None)


@pytest.mark.parametrize("model", MODELS)
def test_no_bound_is_above_the_plan_of_its_layout(model: str):
    ratios: list[float] = []
    for words in map(";".join, product(LAYOUTS, TRAINED.values())):
        search = LayoutSearch(WORLD, UNLIMITED, PlanChoices(recompute=("layer",)), FIXED)
        bound = bound_of(model, words, search)
        if bound is None:
            continue
        setting = build_run_setting(search.with_chosen_dispatcher(bound.config), WORLD, bound.choices)
        peak = fullest_rank(memory_by_rank(setting)).needed / GIB
        assert bound.gib <= peak * (1 + 1e-12), words
        assert bound.seconds <= time_training_step(setting, UNLIMITED).seconds * (1 + 1e-12), words
        ratios.append(bound.gib / peak)
    assert len(ratios) > 30
    assert mean(ratios) > 0.9


@pytest.mark.parametrize("words", ["--optim.groups=*.moe.experts.*: frozen", "--lora.rank=16"])
def test_a_model_fits_by_what_it_trains(words: str):
    """Qwen3-30B on two H100: with all parameters trained 258 GiB a GPU at least."""
    base = ["--train.global_batch=16"]
    whole = resolve_recipe("qwen3-30b-a3b", base, None)
    assert not search_layouts(whole, 2, PlanChoices(), H100).layouts
    config = resolve_recipe("qwen3-30b-a3b", [*base, words], None)
    found = search_layouts(config, 2, PlanChoices(), H100, best=2)
    assert found.layouts
    for layout in found.layouts:
        ranks = plan_memory(layout.config, 2, layout.choices)
        assert fullest_rank(ranks).needed / GIB < H100.memory


def test_layouts_that_cut_blocks_of_a_frozen_base_are_refused_by_name():
    words = ["--lora.rank=16", "--lora.base=nf4", "--train.global_batch=16", "--train.micro_batch=1"]
    config = resolve_recipe("deepseek-v2-lite", words, None)
    found = search_layouts(config, 2, PlanChoices(), H100, frozenset({"train.micro_batch"}), best=1)
    assert found.layouts
    assert "10944 inputs, 5472 on a rank" in found.refusals.examples["blocks of lora.base"]
