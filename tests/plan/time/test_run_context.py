"""The mechanism of a run is the planner's cheapest among those that its layout allows, or the one that is set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.config.run import Config
from moefold.plan.machine.known_links import first_gpu_name, known_gpu
from moefold.plan.options import PlanChoices
from moefold.plan.time.cheapest_context import MECHANISMS, cheapest_context, node_shares_heads, with_context
from moefold.plan.time.run_context import choose_context
from moefold.presets.recipe import resolve_recipe
from tests.plan.time.test_cheapest_context import CASES, configured

NODE = 8
DYNAMIC = "--parallel.context_sizes=dynamic --data.packing=best_fit --data.attend=document"


def tiny(words: str, ranks: int) -> Config:
    return resolve_recipe("tiny", words.split(), ranks)


def test_auto_is_what_the_planner_finds_for_this_card():
    card = known_gpu("cuda", first_gpu_name())
    chosen = set[str]()
    for recipe, ranks, *degrees in CASES:
        config = configured(recipe, ranks, *degrees)
        found = choose_context(config, ranks, "cuda", NODE)
        name = found.config.parallel.context
        assert name == cheapest_context(config, PlanChoices(), card, ranks)
        assert not broken_rules(ConfigOnRanks(found.config, ranks))
        assert found.why.startswith(f"least predicted time, ms of attention in 2 layers: {name} ")
        assert card.name in found.why
        chosen.add(name)
    assert len(chosen) > 1, "the cases differ"


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_that_is_set_stays(name: str):
    config = with_context(tiny("--parallel.cp=2", 2), name)
    assert choose_context(config, 2, "cpu", NODE) == (config, "asked for")


def test_where_no_ranks_share_a_sequence_nothing_is_chosen():
    config = tiny("--parallel.ep=2", 2)
    assert choose_context(config, 2, "cuda", NODE) == (config, "")


def test_mechanisms_that_cannot_swap_heads_are_left_out_and_named():
    """Four query heads; on nodes of four ranks those of a node can share them."""
    config = tiny("--parallel.cp=8", 8)
    found = choose_context(config, 8, "cpu", 8)
    assert found.why.endswith("heads are too few to swap for all_to_all, hierarchical")
    found = choose_context(config, 8, "cpu", 4)
    assert found.why.endswith("heads are too few to swap for all_to_all")


def test_the_ranks_of_a_node_are_those_that_tp_leaves():
    config = tiny("--parallel.cp=8", 8)
    hierarchical = with_context(config, "hierarchical")
    over_tp = replace(hierarchical, parallel=replace(hierarchical.parallel, tp=2, cp=4))
    assert [node_shares_heads(hierarchical, node, 8) for node in (1, 2, 4, 8)] == [True, True, True, False]
    assert [node_shares_heads(over_tp, node, 8) for node in (1, 2, 4, 8)] == [True, True, True, False]


def test_groups_that_nodes_do_not_cut_evenly_swap_heads_among_all_their_ranks():
    """Six heads; on nodes of six ranks a run takes a group of eight to lie inside one node."""
    model = "--model.attention.heads=6 --model.attention.kv_heads=6 --model.attention.head_dim=32"
    config = tiny(f"{model} --parallel.cp=8 --data.seq_len=384 --train.global_batch=24", 24)
    found = choose_context(config, 24, "cpu", 6)
    assert found.why.endswith("heads are too few to swap for all_to_all, hierarchical")


def test_dynamic_sizes_are_priced_in_their_largest_group():
    """Its eight ranks cannot swap the heads, though the two of parallel.cp could."""
    dynamic = tiny(f"{DYNAMIC} --parallel.cp=2", 8)
    found = choose_context(dynamic, 8, "cpu", 8)
    assert found.why.endswith("heads are too few to swap for all_to_all, hierarchical")
    assert found.config == with_context(dynamic, found.config.parallel.context)
    fixed = choose_context(tiny("--parallel.cp=2", 8), 8, "cpu", 8)
    assert all(name in fixed.why for name in MECHANISMS)


def test_attention_of_another_package_goes_in_a_ring(monkeypatch: pytest.MonkeyPatch):
    config = tiny("--parallel.cp=2", 2)
    monkeypatch.setattr(ATTENTION_NAMES, "builtin", {})
    found = choose_context(config, 2, "cpu", NODE)
    assert found.config.parallel.context == "ring"
    assert "no prices" in found.why
