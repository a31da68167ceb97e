"""Open sets of names: a name that was added is legal wherever a built-in one is, and a misspelt one is refused."""

from collections.abc import Iterator

import pytest

from moefold.config.errors import UserError
from moefold.config.open_names import (
    ATTENTION_NAMES,
    DATA_SOURCE_NAMES,
    DISPATCHER_NAMES,
    OPTIMIZER_NAMES,
    ROUTER_SCORE_NAMES,
    OpenNames,
)
from moefold.presets.command_help import list_config_keys
from moefold.presets.recipe import resolve_recipe

BY_KEY = {
    "parallel.dispatcher": DISPATCHER_NAMES,
    "model.moe.router.score": ROUTER_SCORE_NAMES,
    "model.attention.kind": ATTENTION_NAMES,
    "data.source": DATA_SOURCE_NAMES,
}


@pytest.fixture
def pigeon() -> Iterator[str]:
    """A dispatcher that somebody else has written."""
    DISPATCHER_NAMES.add("pigeon", "one pigeon per token")
    yield "pigeon"
    DISPATCHER_NAMES.remove("pigeon")


def test_a_name_that_was_added_is_legal_and_listed_in_help(pigeon: str):
    config = resolve_recipe("tiny", ["--parallel.dispatcher", pigeon])
    assert config.parallel.dispatcher == pigeon
    assert "one pigeon per token" in list_config_keys()


def test_a_name_that_was_not_added_is_refused_with_the_nearest(pigeon: str):
    with pytest.raises(UserError) as refused:
        resolve_recipe("tiny", ["--parallel.dispatcher", "pigoen"])
    assert 'parallel.dispatcher = pigoen is not legal (did you mean "pigeon"?)' in str(refused.value)
    names = "auto, all_gather, all_to_all, dedup, hierarchical, deepep, symmetric, pigeon"
    assert f"expected one of {names}" in str(refused.value)


@pytest.mark.parametrize("path", BY_KEY)
def test_every_built_in_name_is_legal_and_has_a_line_in_help(path: str):
    text = list_config_keys()
    for name in BY_KEY[path]:
        assert f"{name}: {BY_KEY[path].says(name)}" in text


def test_names_are_those_of_one_kind_in_order():
    names = OpenNames("bird", {"dove": "white", "crow": "black"})
    names.add("jay", "blue")
    assert list(names) == ["dove", "crow", "jay"]
    assert len(names) == 3
    assert "jay" in names
    assert names.says("jay") == "blue"
    with pytest.raises(UserError, match=r'no bird "crwo" \(did you mean "crow"\?\); there are: crow, dove, jay'):
        names.require("crwo")


def test_a_name_means_one_thing():
    names = OpenNames("bird", {"dove": "white"})
    names.add("jay", "blue")
    names.add("jay", "blue")  # the same module, imported again
    with pytest.raises(UserError, match="there is a bird"):
        names.add("jay", "green")
    with pytest.raises(UserError, match="there is a bird"):
        names.add("dove", "grey")
    with pytest.raises(UserError, match="built in"):
        names.remove("dove")


@pytest.mark.parametrize("name", ["", "Jay", "blue jay", "jay=1", "7up", "x" * 60])
def test_a_name_can_be_written_on_a_command_line(name: str):
    with pytest.raises(UserError, match="cannot be called"):
        OpenNames("bird", {}).add(name, "any")


def test_adamw_and_muon_are_the_optimizer_rules_that_are_built_in():
    assert list(OPTIMIZER_NAMES) == ["adamw", "muon"]
