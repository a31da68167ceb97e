"""The drawing is well-formed, whole and legible at any size."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from moefold.schedule.catalog import SCHEDULES, program_of
from moefold.schedule.costs import Costs, uniform
from moefold.schedule.draw import COMM, WIDEST, draw, shade
from moefold.schedule.passes import pair_forward_with_backward
from moefold.schedule.program import Program, ops_of
from moefold.schedule.simulate import simulate

SVG = "{http://www.w3.org/2000/svg}"


def drawn(program: Program, costs: Costs, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(draw(program, simulate(program, costs), costs, title))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_op_has_a_box_with_its_name_inside_the_page(name: str):
    program = program_of(name, 4, SCHEDULES[name].least_vpp, 6)
    root = drawn(program, uniform(4 * SCHEDULES[name].least_vpp))
    tips = [rect.findtext(f"{SVG}title", "").partition(":")[0] for rect in root.iter(f"{SVG}rect")]
    assert sorted(tip for tip in tips if tip) == sorted(str(op) for _, op in ops_of(program))
    for rect in root.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= float(root.attrib["width"])


def test_the_legend_tells_of_what_is_drawn_and_of_nothing_else():
    def words(program: Program, costs: Costs) -> set[str]:
        return {text.text or "" for text in drawn(program, costs).iter(f"{SVG}text")}

    plain = words(program_of("1f1b", 2, 1, 2), uniform(2))
    assert {"F forward", "D data gradient", "W weight gradient", "idle"} <= plain
    assert not {"communication", "a pair, woven", "lighter: later chunk of its rank"} & plain
    paired = pair_forward_with_backward(program_of("1f1b", 2, 2, 8))
    assert {"communication", "a pair, woven", "lighter: later chunk of its rank"} <= words(paired, uniform(4, 2, 0.5))


def test_communication_has_a_strip_of_its_own_only_where_there_is_any():
    program = program_of("1f1b", 2, 1, 2)
    assert COMM not in draw(program, simulate(program, uniform(2)), uniform(2), "")
    costs = uniform(2, comm=0.5)
    assert draw(program, simulate(program, costs), costs, "").count(f'fill="{COMM}"><title>') == 2 * 2 * 2


def test_a_long_program_stays_on_the_page_and_leaves_out_numbers_that_do_not_fit():
    root = drawn(program_of("1f1b", 2, 1, 400), uniform(2))
    assert float(root.attrib["width"]) < WIDEST + 200
    assert not [text for text in root.iter(f"{SVG}text") if text.attrib.get("class") == "in"]


def test_titles_cannot_break_the_page_and_free_work_can_be_drawn():
    nothing = replace(uniform(2), compute={kind: [0.0, 0.0] for kind in "FDW"})
    root = drawn(program_of("1f1b", 2, 1, 2), nothing, "<script>&")
    assert "<script>&" in {text.text for text in root.iter(f"{SVG}text")}


def test_ink_is_legible_on_every_shade():
    def light(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        return sum(w * int(digits[i : i + 2], 16) for i, w in ((0, 0.299), (2, 0.587), (4, 0.114)))

    for kind in "FDW":
        for chunk in range(6):
            fill, ink = shade(kind, chunk)
            assert abs(light(fill) - light(ink)) > 100, (kind, chunk)
