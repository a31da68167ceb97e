"""Mixtures: each source has its share to within one sequence at every point, also behind a change of weights."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.mixture_weights import parse_weights
from moefold.data import mixture as mixture_module
from moefold.data.mixture import Mixture


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


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_module, "BLOCK", 64)


LONG_PERIODS = [
    "0.123457/0.765432/0.111111",
    "0.333333333333/0.666666666667/0.0000000001",
    "31415926/2718281/1618033/1/577215",
    "0.999999/0.000001",
]


@pytest.mark.parametrize("weights", LONG_PERIODS)
def test_weights_of_any_denominator_are_exact_to_within_one_in_every_block(weights: str, short_blocks: None):
    sources = weights.count("/") + 1
    phases = parse_weights([weights], sources)
    mixture = Mixture(phases, 1)
    assert mixture.phases[0].period > 65_536
    for number, counts in enumerate(walk(mixture, 500, sources)):
        assert mixture.counts(number) == counts
        for count, weight in zip(counts, phases[0].weights, strict=True):
            assert abs(count - number * weight) < 1


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    texts = ["5/3/7/1/29", "10:3/0/14/15/92"]
    phases = parse_weights(texts, 5)
    in_one = [Mixture(phases, 20).place(number) for number in range(300)]
    monkeypatch.setattr(mixture_module, "BLOCK", 16)
    blocks = Mixture(phases, 20)
    assert [blocks.place(number) for number in range(300)] == in_one


def test_a_walk_that_begins_anywhere_equals_the_walk_from_the_beginning(short_blocks: None):
    """As after a resume; blocks that were forgotten are walked once more."""
    phases = parse_weights(["0.123457/0.765432/0.111111", "70:0.1111111/0.2222222/0.6666667"], 3)
    whole = Mixture(phases, batch=8)
    in_order = [whole.place(number) for number in range(1200)]
    for number in (1199, 3, 560, 559, 64, 1130):
        assert Mixture(phases, batch=8).place(number) == in_order[number]
        assert whole.place(number) == in_order[number]


def test_whole_periods_are_not_walked():
    mixture = Mixture(parse_weights(["0.1234567/0.8765433"], 2), 1)
    assert mixture.counts(10**12) == [123_456_700_000, 876_543_300_000]
    assert len(mixture.phases[0].given) <= 2


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
