"""The drawing is well-formed, whole and legible at any size."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from moefold.schedule.draw_svg import COMM_COLOUR, MAX_TIME_PIXELS, draw_timeline, op_colour_and_ink
from moefold.schedule.passes import pair_forward_with_backward
from moefold.schedule.program import Program, ops_with_ranks
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.simulate_program import simulate_program
from moefold.schedule.stage_costs import StageCosts, uniform_costs

SVG = "{http://www.w3.org/2000/svg}"


def drawn(program: Program, costs: StageCosts, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(draw_timeline(program, simulate_program(program, costs), costs, title))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_op_has_a_box_with_its_name_inside_the_page(name: str):
    program = build_program(name, 4, SCHEDULES[name].least_vpp, 6)
    root = drawn(program, uniform_costs(4 * SCHEDULES[name].least_vpp))
    tips = [rect.findtext(f"{SVG}title", "").partition(":")[0] for rect in root.iter(f"{SVG}rect")]
    assert sorted(tip for tip in tips if tip) == sorted(str(op) for _, op in ops_with_ranks(program))
    for rect in root.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= float(root.attrib["width"])


def test_the_legend_tells_of_what_is_drawn_and_of_nothing_else():
    def words(program: Program, costs: StageCosts) -> set[str]:
        return {text.text or "" for text in drawn(program, costs).iter(f"{SVG}text")}

    plain = words(build_program("1f1b", 2, 1, 2), uniform_costs(2))
    assert {"F forward", "D data gradient", "W weight gradient", "idle"} <= plain
    assert not {"communication", "pair, interleaved", "lighter: later chunk of its rank"} & plain
    paired = pair_forward_with_backward(build_program("1f1b", 2, 2, 8))
    assert {"communication", "pair, interleaved", "lighter: later chunk of its rank"} <= words(
        paired, uniform_costs(4, 2, 0.5)
    )


def test_communication_has_a_strip_of_its_own_only_where_there_is_any():
    program = build_program("1f1b", 2, 1, 2)
    assert COMM_COLOUR not in draw_timeline(program, simulate_program(program, uniform_costs(2)), uniform_costs(2), "")
    costs = uniform_costs(2, comm=0.5)
    assert (
        draw_timeline(program, simulate_program(program, costs), costs, "").count(f'fill="{COMM_COLOUR}"><title>')
        == 2 * 2 * 2
    )


def test_a_long_program_stays_on_the_page_and_leaves_out_numbers_that_do_not_fit():
    root = drawn(build_program("1f1b", 2, 1, 400), uniform_costs(2))
    assert float(root.attrib["width"]) < MAX_TIME_PIXELS + 200
    assert not [text for text in root.iter(f"{SVG}text") if text.attrib.get("class") == "in"]


def test_titles_cannot_break_the_page_and_free_work_can_be_drawn():
    nothing = replace(uniform_costs(2), compute={kind: [0.0, 0.0] for kind in "FDW"})
    root = drawn(build_program("1f1b", 2, 1, 2), nothing, "<script>&")
    assert "<script>&" in {text.text for text in root.iter(f"{SVG}text")}


def test_ink_is_legible_on_every_shade():
    def light(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        return sum(w * int(digits[i : i + 2], 16) for i, w in ((0, 0.299), (2, 0.587), (4, 0.114)))

    for kind in "FDW":
        for chunk in range(6):
            fill, ink = op_colour_and_ink(kind, chunk)
            assert abs(light(fill) - light(ink)) > 100, (kind, chunk)
