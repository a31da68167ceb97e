"""Entries of `optim.groups`: read as they are written, refused with what was expected."""

from __future__ import annotations

import pytest

from moefold.config.errors import UserError
from moefold.config.optimizer_groups import OptimizerGroup, group_problems, parse_groups

ENTRY = "*.router.weight: lr=0.5 decay=0 betas=0.9,0.99 eps=1e-6 rule=adamw"
READ = OptimizerGroup("*.router.weight", 0.5, 0.0, (0.9, 0.99), 1e-6, "adamw")


def test_an_entry_has_a_pattern_and_options():
    assert parse_groups([ENTRY, "embedding.*: lr=2"]) == [READ, OptimizerGroup("embedding.*", 2.0)]
    assert parse_groups(()) == []
    assert READ.matches("blocks.0.moe.router.weight")
    assert not READ.matches("blocks.0.moe.router.bias")


@pytest.mark.parametrize("words", ["frozen", "frozen=true"])
def test_an_entry_may_freeze(words: str):
    assert parse_groups([f"embedding.*: {words}"]) == [OptimizerGroup("embedding.*", frozen=True)]
    assert parse_groups(["embedding.*: frozen=false"]) == [OptimizerGroup("embedding.*")]


def test_an_entry_that_a_list_cut_at_its_comma_is_joined_again():
    assert parse_groups(["a: lr=1", *ENTRY.split(","), "b: decay=1"])[1] == READ


WRONG = {
    "lr=0.5": "expected a pattern, a colon and options",
    "a: ": "expected a pattern, a colon and options",
    "a: lr=fast": "expected lr = a factor from 0 to 100",
    "a: lr=nan": "expected lr = a factor",
    "a: deca=0": 'no option "deca" (did you mean "decay"?)',
    "a: betas=0.9": "expected betas = two numbers",
    "a: betas=0.9,1.0": "expected betas = two numbers from 0 to below 1",
    "a: frozen=1": "expected frozen, frozen=true or frozen=false",
    "a: frozen lr=0.5": "expected frozen alone",
    "a: rule=adam": 'no rule "adam" (did you mean "adamw"?)',
}


@pytest.mark.parametrize("entry", WRONG)
def test_what_cannot_be_read_is_refused_with_what_was_expected(entry: str):
    with pytest.raises(UserError) as refused:
        parse_groups([entry])
    assert WRONG[entry] in str(refused.value)
    assert WRONG[entry] in group_problems([entry])


def test_all_wrong_entries_are_reported_at_once():
    with pytest.raises(UserError) as refused:
        parse_groups(["a: lr=fast", ENTRY, "b: eps=0"])
    assert len(refused.value.problems) == 2
