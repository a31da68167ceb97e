"""What `parallel.context_sending` says, by the size of a group."""

import pytest

from moefold.config.context_sending import keys_by_size, read_keys
from moefold.config.errors import UserError

SIZES = [1, 2, 4, 8]


def test_entries_are_of_groups_above_one_and_a_single_one_is_of_all():
    assert keys_by_size(("10", "2e3", "0"), SIZES) == {1: 0, 2: 10, 4: 2000, 8: 0}
    assert keys_by_size(("7",), SIZES) == {1: 0, 2: 7, 4: 7, 8: 7}
    assert keys_by_size((), SIZES) == dict.fromkeys(SIZES, 0)
    assert keys_by_size(("3",), [1]) == {1: 0}


def test_other_numbers_of_entries_are_refused_with_the_sizes():
    with pytest.raises(UserError, match="has 2 entries; expected 3, for groups of 2, 4, 8 ranks"):
        keys_by_size(("1", "2"), SIZES)


@pytest.mark.parametrize("text", ["", "many", "-1", "nan", "inf", "1e13"])
def test_what_is_no_number_of_keys_is_none(text: str):
    assert read_keys(text) is None
