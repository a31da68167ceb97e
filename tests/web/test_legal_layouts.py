"""Sliders stand on values that a model and a cluster allow; what is not legal leads to the nearest that is."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.web.legal_layouts import legal_layouts

QWEN = {"model": "qwen3-30b-a3b", "gpus": 8, "gpu": "h100", "seq": 4096, "mbs": 1, "gbs": 64, "parallel.ep": 8}


def test_values_divide_what_they_cut():
    values = legal_layouts({**QWEN, "gpus": 48, "gbs": 48})["values"]
    assert values["parallel.tp"] == [1, 2, 4, 8], "four heads of keys, which two ranks may share"
    assert values["parallel.pp"] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert values["parallel.ep"] == [1, 2, 4, 8, 16]
    assert 48 in values["gbs"]
    assert 96 in values["gbs"]


def test_where_a_slider_stands_is_among_its_values_legal_or_not():
    found = legal_layouts({**QWEN, "parallel.ep": 3, "gbs": 7})
    assert 3 in found["values"]["parallel.ep"]
    assert 7 in found["values"]["gbs"]
    assert any("parallel.ep" in problem["keys"] for problem in found["problems"])


def test_what_was_moved_stays_and_the_rest_follows():
    moved = {**QWEN, "parallel.pp": 2}
    assert legal_layouts(moved, "parallel.pp")["changes"] == {"parallel.ep": 4}
    assert legal_layouts(moved, "parallel.ep")["changes"] == {"parallel.pp": 1}
    assert legal_layouts({**QWEN, "pipeline.vpp": 2}, "pipeline.vpp")["changes"] == {"parallel.pp": 2, "parallel.ep": 4}


def test_a_legal_layout_is_left_alone():
    found = legal_layouts(QWEN)
    assert found["problems"] == []
    assert found["changes"] == {}


def test_what_no_layout_mends_has_no_nearest_one():
    found = legal_layouts({**QWEN, "model.attention.kv_heads": 3})
    assert found["problems"]
    assert found["changes"] is None


def test_values_that_are_no_values_are_refused():
    with pytest.raises(UserError, match=r"gpus = 0 is not legal"):
        legal_layouts({**QWEN, "gpus": 0})


NUMBERS = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@pytest.mark.extended
@settings(max_examples=20, deadline=None)
@given(
    gpus=st.sampled_from([1, 2, 6, 8, 24, 64, 72]),
    layout=st.fixed_dictionaries({f"parallel.{name}": NUMBERS for name in ("tp", "cp", "pp", "ep", "etp")}),
    vpp=NUMBERS,
    hold=st.sampled_from(["", "parallel.pp", "parallel.ep", "gbs"]),
)
def test_the_nearest_layout_is_legal_and_holds_what_was_moved(gpus: int, layout: dict[str, int], vpp: int, hold: str):
    asked: dict[str, Any] = {**QWEN, "gpus": gpus, **layout, "pipeline.vpp": vpp}
    changes = legal_layouts(asked, hold)["changes"]
    if changes is None:
        return
    assert hold not in changes
    assert legal_layouts({**asked, **changes})["problems"] == []
