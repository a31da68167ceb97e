"""The architecture picture is drawn from the imports, and the file in docs is up to date."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.support.architecture import COMMAND, PICTURE, architecture_svg, package_imports, place_rooms, without_implied
from tests.support.house import ROOT
from tests.test_floors import FLOORS


def test_the_picture_in_docs_is_what_the_script_draws():
    drawn = PICTURE.read_text(encoding="utf-8") if PICTURE.exists() else ""
    assert drawn == architecture_svg(), f"{PICTURE.name} is stale; run: {COMMAND}"


def test_every_package_is_a_room_and_no_two_overlap():
    graph = package_imports(ROOT)
    rooms = place_rooms(set(graph))
    assert rooms.keys() == graph.keys()
    corners = [(room.x, room.y) for room in rooms.values()]
    assert len(set(corners)) == len(rooms)
    assert {room.floor for room in rooms.values()} == set(range(len(FLOORS)))


def test_every_import_is_an_arrow_or_implied_by_a_longer_way():
    graph = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set[str]()}
    assert without_implied(graph) == [("middle", "bottom"), ("top", "middle")]


def test_the_picture_is_an_svg_with_every_name():
    tree = ElementTree.fromstring(architecture_svg())
    assert tree.tag.endswith("svg")
    texts = {element.text for element in tree.iter() if element.tag.endswith("text")}
    assert package_imports(ROOT).keys() <= texts
