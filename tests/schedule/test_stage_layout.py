"""Layout strings: read, written, held against a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.schedule.schedule_catalog import SCHEDULES
from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.stage_layout import (
    MAX_LAYOUT_LENGTH,
    StageLayout,
    check_layout,
    parse_layout,
    stage_layout_problems,
    write_layout,
)

DEEPSEEK = "Et*3|(tt|)*29m|L"


def test_the_published_string_reproduces_table_10():
    """DeepSeek-V3 at PP16 x VPP2: rank 0 has the embedding and 3 layers, then 2; ranks 1 to 13 have 2 and 2; rank 14
    has 2, then MTP; rank 15 has 2, then the loss."""
    layout = check_layout(parse_layout(DEEPSEEK), 32, layers=61, dense_layers=3, mtp_layers=1)
    rows = [[layout.stages[s] for s in SCHEDULES["interleaved"].stages_on_rank(rank, 16, 2)] for rank in range(16)]
    assert rows[0] == ["Ettt", "tt"]
    assert rows[1:14] == [["tt", "tt"]] * 13
    assert rows[14] == ["tt", "m"]
    assert rows[15] == ["tt", "L"]


@pytest.mark.parametrize(
    ("text", "stages"), [(DEEPSEEK, 32), ("Et|(tt|)*30L", 32), ("Et*4|(tttt|)*14tmL", 16), ("EtL", 1)]
)
def test_published_strings_have_their_number_of_stages(text: str, stages: int):
    assert len(parse_layout(text).stages) == stages


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        (DEEPSEEK, DEEPSEEK),
        ("Et|(tt|)*30L", "Et|(tt|)*30L"),
        ("E tt | tt | tt | t * 2 | L", "Ett|(tt|)*3L"),
        ("Et*4|(tttt|)*14tmL", "Et*4|(t*4|)*14tmL"),
        ("E|((t|)*2tt|)*3L", "E|(t|t|tt|)*3L"),
        ("Et|tL", "Et|tL"),
    ],
)
def test_a_layout_is_written_in_its_shortest_form(text: str, shortest: str):
    assert str(parse_layout(text)) == shortest
    assert parse_layout(shortest) == parse_layout(text)


@given(st.lists(st.text("Edtm", min_size=1, max_size=5), min_size=1, max_size=12))
def test_what_is_written_reads_back_to_the_same_layout(stages: list[str]):
    layout = StageLayout(tuple(stages))
    assert parse_layout(write_layout(layout)) == layout
    assert len(write_layout(layout)) <= len("|".join(stages))


def test_layers_are_counted_over_stages_whatever_they_are_called():
    layout = parse_layout("Ed*3|(tt|)*2m|L")
    assert [list(layout.layers(s)) for s in range(5)] == [[0, 1, 2], [3, 4], [5, 6], [], []]
    assert [list(layout.mtp_layers(s)) for s in range(5)] == [[], [], [], [0], []]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Et|x", "has 'x' as character 4; expected E (embedding), d (dense layer)"),
        ("E(tt|", "has 1 `(` but 0 `)`"),
        ("Et)(tL", "has `)` at character 3 without `(`"),
        ("Et*0L", "repeats a piece 0 times, up to character 4"),
        ("Et*L", "has '*' as character 3"),
        ("*3", "has '*' as character 1"),
        ("E((t*999)*999)*999L", f"longer than {MAX_LAYOUT_LENGTH} pieces"),
        ("(" * 100 + "t" + ")" * 100, "has '('"),
        ("Et\x1b[2JL", "\\x1b"),
    ],
)
def test_a_string_that_cannot_be_read_is_told_by_character(text: str, says: str):
    with pytest.raises(ScheduleError) as told:
        parse_layout(text)
    assert says in str(told.value)
    assert "\x1b" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Et*3|(tt|)*28m|L", "has 31 stages; expected pp x vpp = 32"),
        ("Et*2|(tt|)*29m|L", "has 60 t or d (transformer layer), 1 missing; expected 61"),
        ("Et*4|(tt|)*29m|L", "has 62 t or d (transformer layer), 1 too many; expected 61"),
        ("Et*3|(tt|)*29m|m", "has 0 L (loss), 1 missing; expected 1"),
        ("Et*3|(tt|)*29L|m", "stage 31 has m (MTP layer) behind L (loss)"),
        ("Et*3|(tt|)*28tL|t|m", "stage 30 has t (transformer layer) behind L (loss)"),
        ("tE|ttt|(tt|)*28tm|L", "stage 0 has E (embedding) behind t (transformer layer)"),
        ("Et*3|(tt|)*29mE|L", "has 2 E (embedding), 1 too many; expected 1"),
        ("Et*3|(tt|)*29mm|L", "has 2 m (MTP layer), 1 too many; expected 1"),
        ("Ed*4|t|(tt|)*28m|L", "stage 0 calls layer 3 dense (d), but the model has 3 dense layers; write t"),
        ("Et*5||(tt|)*28m|L", "stage 1 of layout"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_told_with_what_would(text: str, says: str):
    told = stage_layout_problems(parse_layout(text), 32, layers=61, dense_layers=3, mtp_layers=1)
    assert any(says in problem for problem in told), told


def test_all_that_is_wrong_with_a_layout_is_told_at_once():
    with pytest.raises(ScheduleError) as told:
        check_layout(parse_layout("t|E"), 4, layers=3)
    assert len(told.value.problems) == 4
