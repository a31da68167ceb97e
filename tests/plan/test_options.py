"""Choices of a plan: what is refused, and how."""

import pytest

from moefold.config.errors import UserError
from moefold.config.keys import iterate_keys
from moefold.config.read import with_values
from moefold.plan.options import PRECISION_RECIPES, RECOMPUTE_REGIONS, REGION_ALIASES, PlanChoices


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"precision": "fp9"}, 'no precision "fp9" (did you mean "fp8"?)'),
        ({"stack": "megaton"}, 'no stack "megaton" (did you mean "megatron"?)'),
        ({"recompute": ("activatoin",)}, 'no region "activatoin" (did you mean "activation"?); there are: norm, up,'),
        ({"offload": ("cores",)}, 'no region "cores" (did you mean "core"?)'),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(values: dict[str, str], said: str):
    with pytest.raises(UserError) as refused:
        PlanChoices(**values)  # pyright: ignore
    assert said in str(refused.value)


def test_all_unknown_regions_are_told_at_once():
    with pytest.raises(UserError) as refused:
        PlanChoices(recompute=("norms", "normed", "mlp"))
    assert len(refused.value.problems) == 2


def test_choices_are_read_like_a_configuration():
    problems: dict[str, str] = {}
    words = {"recompute": "norm, moe_act", "spread": "0.2", "states_on_host": "true", "node": "72"}
    read = with_values(PlanChoices(), words, problems)  # pyright: ignore
    assert not problems
    assert read == PlanChoices(recompute=("norm", "moe_act"), spread=0.2, states_on_host=True, node=72)
    with_values(PlanChoices(), {"spread": "-1", "presicion": "fp8"}, problems)  # pyright: ignore
    assert "at least 0" in problems["spread"]
    assert 'did you mean "precision"?' in problems["presicion"]


def test_every_key_says_what_it_means_and_every_other_name_is_a_region():
    assert all(key.doc for key in iterate_keys(PlanChoices()))
    assert set(REGION_ALIASES.values()) <= set(RECOMPUTE_REGIONS)
    assert not set(REGION_ALIASES) & set(RECOMPUTE_REGIONS)


def test_lower_precision_never_keeps_more():
    order = ["fp32", "bf16", "fp8-blockwise", "fp8", "nvfp4"]
    linear = [PRECISION_RECIPES[name].linear for name in order]
    assert linear == sorted(linear, reverse=True)


def test_choices_can_be_keys_of_a_cache():
    assert hash(PlanChoices(recompute=("norm",))) == hash(PlanChoices(recompute=("norm",)))
    assert PlanChoices(recompute=("norm",)) != PlanChoices(recompute=("core",))
