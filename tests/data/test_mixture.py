"""Mixtures: each source has its share to within one sequence at every point, also behind a change of weights."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.mixture_weights import parse_weights
from moefold.data.mixture import LONGEST_PERIOD, Mixture, slots_of


def walk(mixture: Mixture, count: int, sources: int) -> list[list[int]]:
    """The sequences of each source before every point, counted one by one; numbers must be consecutive."""
    given_so_far = [0] * sources
    counted = [list(given_so_far)]
    for number in range(count):
        place = mixture.place(number)
        assert place.number == given_so_far[place.source]
        given_so_far[place.source] += 1
        counted.append(list(given_so_far))
    return counted


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any))
def test_shares_are_exact_to_within_one_at_every_point(weights: list[int]):
    text = "/".join(map(str, weights))
    phases = parse_weights([text], len(weights))
    counted = walk(mixture := Mixture(phases, 1), 400, len(weights))
    for number, counts in enumerate(counted):
        assert mixture.counts(number) == counts
        for count, weight in zip(counts, phases[0].weights, strict=True):
            assert abs(count - number * weight) < 1


def test_a_change_of_weights_at_a_step_is_exact_on_both_sides():
    mixture = Mixture(parse_weights(["0.7/0.3/0", "5:0.2/0.3/0.5"], 3), batch=8)
    counted = walk(mixture, 200, 3)
    assert counted[40] == mixture.counts(40)
    assert counted[40][2] == 0
    for number in range(40, 200):
        for source, weight in enumerate((Fraction(1, 5), Fraction(3, 10), Fraction(1, 2))):
            since = counted[number][source] - counted[40][source]
            assert abs(since - (number - 40) * weight) < 1
    unchanged = Mixture(parse_weights(["0.7/0.3/0"], 3), batch=8)
    assert [unchanged.place(n) for n in range(40)] == [mixture.place(n) for n in range(40)]


def test_weights_of_many_decimals_are_rounded_to_a_period_and_none_vanishes():
    weights = parse_weights(["0.333333333333/0.666666666667/0.0000000001"], 3)[0].weights
    slots = slots_of(weights)
    assert sum(slots) == LONGEST_PERIOD
    assert slots[2] == 1
    assert all(
        abs(slot / LONGEST_PERIOD - weight) < 2 / LONGEST_PERIOD for slot, weight in zip(slots, weights, strict=True)
    )
    counts = Mixture(parse_weights(["0.1234567/0.8765433"], 2), 1).counts(10**12)
    assert sum(counts) == 10**12


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["0.7"], "1 weights for 2 folders"),
        (["a/b"], "expected weights such as 0.7/0.3"),
        (["0/0"], "all weights are 0"),
        (["-1/2"], "expected weights from 0"),
        (["5:1/1"], "the first weights hold from the beginning"),
        (["1/1", "9:1/2", "9:2/1"], "expected a step above 9"),
        (["1/1e400000"], "expected weights from 0"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(entries: list[str], problem: str):
    with pytest.raises(UserError, match=problem):
        parse_weights(entries, 2)
