"""The presets are the published models."""

import pytest

from moefold.anatomy.counts import active_parameters, total_parameters
from moefold.presets.zoo import PRESETS

# Billions of parameters as their authors print them.
PUBLISHED = {
    "mixtral-8x7b": ("46.7", "12.9"),
    "mixtral-8x22b": ("140.6", "39.1"),
    "olmoe-1b-7b": ("6.92", "1.28"),
    "qwen3-30b-a3b": ("30.5", "3.3"),
    "qwen3-235b-a22b": ("235", "22"),
}


def last_digit(printed: str) -> float:
    """One unit of the last printed digit: 0.1 of 46.7."""
    return 10.0 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_and_active_parameters_are_the_published_ones(name: str):
    model = PRESETS[name]().model
    for printed, count in zip(PUBLISHED[name], (total_parameters(model), active_parameters(model)), strict=True):
        assert abs(count / 1e9 - float(printed)) < last_digit(printed), f"{count / 1e9:.3f} is not {printed}"


def test_every_large_preset_is_held_against_its_publication():
    assert {*PUBLISHED, "tiny"} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_carries_its_own_name(name: str):
    assert PRESETS[name]().name == name
    assert PRESETS[name]() == PRESETS[name](), "it is a plain value, made anew each time"


def test_tiny_has_every_mechanism_and_is_small():
    tiny = PRESETS["tiny"]()
    assert tiny.model.moe.top_k < tiny.model.moe.experts
    assert tiny.model.moe.bias_rate > 0
    assert tiny.model.attention.kv_heads < tiny.model.attention.heads
    assert total_parameters(tiny.model) < 5e6
