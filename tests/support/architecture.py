"""The architecture picture: packages as rooms on their floors, imports between them as arrows.

    python -m tests.support.architecture docs/images/architecture.svg

Floors come from tests/test_floors.py, arrows from the imports of the source, roles from the tree in README.md.
An arrow is left out where a longer way of arrows leads to the same room; a room's tooltip lists all its imports.
Torch-free rooms form the left wing. An arrow over several floors runs through the gaps between rooms.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.support.house import ROOT, import_graph, reachable, source_files
from tests.test_floors import FLOORS, TORCH_FREE

README = ROOT.parent / "README.md"
PICTURE = ROOT.parent / "docs" / "images" / "architecture.svg"
COMMAND = f"python -m tests.support.architecture {PICTURE.relative_to(ROOT.parent)}"

WIDTH = 1120
MARGIN = 28
FLOOR_HEIGHT = 72
FLOOR_GAP = 34
ROOM_WIDTH = 178
ROOM_GAP = 28
ROOM_PITCH = ROOM_WIDTH + ROOM_GAP
NUMBER_WIDTH = 34  # the strip at the left with the floor's number
LEFT_WING, LEFT_COLUMNS = MARGIN + NUMBER_WIDTH + 12, 2
RIGHT_WING, RIGHT_COLUMNS = LEFT_WING + LEFT_COLUMNS * ROOM_PITCH + 8, 3
FOOT = 46
LETTERS_PER_LINE = 28
ROLE_LINES = 3
ROLE_PITCH = 13.5
LANE_WIDTH = 7  # between two arrows in one gap
BEND_COST = 40  # a bend counts as much as this way sideways

STYLE = """
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
  .floor { fill: #f1f3f7; }
  .number { fill: #9aa3b2; font-size: 13px; text-anchor: middle; }
  .room { fill: #ffffff; stroke: #b6c0d0; }
  .free { fill: #eaf6ee; stroke: #85b899; }
  .name { fill: #18212f; font-size: 14.5px; font-weight: 600; }
  .role { fill: #5a6678; font-size: 11px; }
  .arrow { fill: none; stroke: #7f8ea6; stroke-width: 1.1; opacity: 0.85; }
  .head { fill: #7f8ea6; }
  .note { fill: #5a6678; font-size: 12px; }
"""


class Room(NamedTuple):
    name: str
    floor: int
    x: float
    y: float

    @property
    def centre(self) -> float:
        return self.x + ROOM_WIDTH / 2

    @property
    def bottom(self) -> float:
        return self.y + FLOOR_HEIGHT


class Point(NamedTuple):
    x: float
    y: float


PackageGraph = dict[str, set[str]]


# ---- what is drawn: packages, imports, roles


@cache
def package_imports(root: Path) -> PackageGraph:
    """By package, the other packages that any of its files imports. Files beside the packages do not count."""
    packages = {path.name for path in root.iterdir() if any(path.glob("*.py"))}
    graph: PackageGraph = {name: set() for name in packages}
    for module, imported in import_graph(source_files(root), root).items():
        package = package_of(module)
        if package in packages:
            graph[package] |= {package_of(other) for other in imported} & packages - {package}
    return graph


def package_of(module: str) -> str:
    """`moefold.plan.memory.peak` -> `plan`."""
    return module.partition(".")[2].partition(".")[0]


def without_implied(graph: PackageGraph) -> list[tuple[str, str]]:
    """The arrows that no longer way implies (transitive reduction)."""
    arrows: list[tuple[str, str]] = []
    for package, imported in sorted(graph.items()):
        for other in sorted(imported):
            between = imported - {other}
            if not any(other in reachable(graph, middle) for middle in between):
                arrows.append((package, other))
    return arrows


def roles_in_readme() -> dict[str, str]:
    """The first phrase of each package's line in README's tree."""
    tree = README.read_text().partition("\n## The tree")[2]
    lines = re.findall(r"^  (\w+)/ +(.+)$", tree, re.MULTILINE)
    return {name: first_phrase(text) for name, text in lines}


def first_phrase(text: str) -> str:
    without_brackets = re.sub(r" \(.*?\)", "", text)
    return re.split(r"[:;.]", without_brackets)[0].strip()


def role_of(package: Path, roles: dict[str, str]) -> str:
    """The package's line in README's tree, or else its docstring."""
    if package.name in roles:
        return roles[package.name]
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    phrase = first_phrase(docstring or "")
    return phrase[:1].lower() + phrase[1:]


# ---- where it is drawn: rooms on floors, arrows through gaps


def place_rooms(packages: set[str]) -> dict[str, Room]:
    rooms: dict[str, Room] = {}
    for floor, names in enumerate(FLOORS):
        present = [name for name in names if name in packages]
        free = [name for name in present if name in TORCH_FREE]
        heavy = [name for name in present if name not in TORCH_FREE]
        edges = [*spread_over_wing(len(free), LEFT_WING, LEFT_COLUMNS)]
        edges += spread_over_wing(len(heavy), RIGHT_WING, RIGHT_COLUMNS)
        for name, x in zip([*free, *heavy], edges, strict=True):
            rooms[name] = Room(name, floor, x, floor_top(floor))
    return rooms


def floor_top(floor: int) -> float:
    return MARGIN + (len(FLOORS) - 1 - floor) * (FLOOR_HEIGHT + FLOOR_GAP)


def spread_over_wing(count: int, left: float, columns: int) -> list[float]:
    """Left edges of `count` rooms, centred in a wing of so many columns."""
    start = left + (columns - count) * ROOM_PITCH / 2
    return [start + number * ROOM_PITCH for number in range(count)]


class ArrowRouter:
    """Finds a way for each arrow: through the gaps between rooms, apart from earlier arrows, with few bends."""

    def __init__(self, rooms: dict[str, Room]):
        self.gaps = {floor: gaps_on_floor(rooms, floor) for floor in range(len(FLOORS))}
        self.taken: dict[int, list[float]] = {floor: [] for floor in self.gaps}

    def route_arrow(self, start: Point, end: Point, floors: list[int]) -> list[Point]:
        """The points of an arrow that passes these floors on its way down."""
        # Least cost by floor and place, from the top down: {x: (cost, the places so far)}.
        ways: dict[float, tuple[float, list[float]]] = {start.x: (0.0, [])}
        for floor in floors:
            wanted = [*ways, end.x]
            places = self.free_places(floor, wanted)
            ways = {x: cheapest_way(ways, x) for x in places}
        _, path = cheapest_way(ways, end.x)
        points = [start]
        for floor, x in zip(floors, path, strict=False):
            self.taken[floor].append(x)
            points += [Point(x, floor_top(floor)), Point(x, floor_top(floor) + FLOOR_HEIGHT)]
        return [*points, end]

    def free_places(self, floor: int, wanted: list[float]) -> list[float]:
        """Where an arrow may pass a floor: near the wanted places and along the edges of gaps."""
        places: set[float] = set()
        for low, high in self.gaps[floor]:
            first, last = low + LANE_WIDTH, high - LANE_WIDTH
            lanes = [first + LANE_WIDTH * number for number in range(4)]
            lanes += [last - LANE_WIDTH * number for number in range(4)]
            places |= {x for x in [*wanted, *lanes] if first <= x <= last}
        taken = self.taken[floor]
        return sorted(x for x in places if all(abs(x - other) >= LANE_WIDTH - 1 for other in taken))


def cheapest_way(ways: dict[float, tuple[float, list[float]]], x: float) -> tuple[float, list[float]]:
    """The cheapest way that goes on to x; sideways moves and bends cost."""

    def cost_from(previous: float) -> float:
        sideways = abs(x - previous)
        return ways[previous][0] + sideways + (BEND_COST if sideways else 0)

    best = min(ways, key=cost_from)
    return cost_from(best), [*ways[best][1], x]


def gaps_on_floor(rooms: dict[str, Room], floor: int) -> list[tuple[float, float]]:
    """Free intervals of x on a floor, between rooms and at both ends."""
    here = [room for room in rooms.values() if room.floor == floor]
    here.sort(key=lambda room: room.x)
    walls = [LEFT_WING - 16]
    for room in here:
        walls += [room.x, room.x + ROOM_WIDTH]
    walls.append(WIDTH - MARGIN)
    return list(zip(walls[::2], walls[1::2], strict=True))


def smooth_path(points: list[Point]) -> str:
    """Cubic curves with vertical tangents at every point."""
    parts = [f"M{points[0].x:.1f},{points[0].y:.1f}"]
    for a, b in pairwise(points):
        middle = (a.y + b.y) / 2
        parts.append(f"C{a.x:.1f},{middle:.1f} {b.x:.1f},{middle:.1f} {b.x:.1f},{b.y:.1f}")
    return " ".join(parts)


def door_positions(room: Room, others: list[Room]) -> dict[str, float]:
    """Where arrows leave or enter a room: side by side, in the order of the rooms at their other ends."""
    ordered = sorted(others, key=lambda other: other.centre)
    step = min(30.0, (ROOM_WIDTH - 40) / max(1, len(ordered)))
    first = room.centre - step * (len(ordered) - 1) / 2
    return {other.name: first + step * number for number, other in enumerate(ordered)}


# ---- how it is drawn


def draw_arrows(arrows: list[tuple[str, str]], rooms: dict[str, Room]) -> list[str]:
    exits: dict[str, dict[str, float]] = {}
    entries: dict[str, dict[str, float]] = {}
    for name, room in rooms.items():
        exits[name] = door_positions(room, [rooms[target] for source, target in arrows if source == name])
        entries[name] = door_positions(room, [rooms[source] for source, target in arrows if target == name])
    router = ArrowRouter(rooms)
    parts: list[str] = []
    for source, target in sorted(arrows, key=lambda arrow: arrow_length(arrow, rooms)):
        start = Point(exits[source][target], rooms[source].bottom)
        end = Point(entries[target][source], rooms[target].y - 5)
        if len(entries[target]) == 1 and abs(start.x - end.x) < ROOM_WIDTH / 4:
            end = Point(start.x, end.y)  # a straight arrow, where nothing else enters the room
        between = range(rooms[source].floor - 1, rooms[target].floor, -1)
        points = router.route_arrow(start, end, list(between))
        parts.append(f'<path class="arrow" d="{smooth_path(points)}"/>')
        parts.append(f'<path class="head" d="M{end.x - 3:.1f},{end.y - 1:.1f} h6 l-3,6 z"/>')
    return parts


def arrow_length(arrow: tuple[str, str], rooms: dict[str, Room]) -> tuple[float, float, str]:
    """Short arrows are routed first, so that long ones make way."""
    source, target = rooms[arrow[0]], rooms[arrow[1]]
    return source.floor - target.floor, abs(source.centre - target.centre), source.name + target.name


def draw_floors() -> list[str]:
    parts: list[str] = []
    for floor in range(len(FLOORS)):
        y = floor_top(floor)
        box = f'x="{MARGIN}" y="{y - 6}" width="{WIDTH - 2 * MARGIN}" height="{FLOOR_HEIGHT + 12}"'
        parts.append(f'<rect class="floor" {box} rx="8"/>')
        parts.append(
            f'<text class="number" x="{MARGIN + NUMBER_WIDTH / 2}" y="{y + FLOOR_HEIGHT / 2 + 5}">{floor}</text>'
        )
    return parts


def draw_room(room: Room, role: str, imported: set[str]) -> list[str]:
    kind = "room free" if room.name in TORCH_FREE else "room"
    tooltip = f"{room.name} imports {', '.join(sorted(imported)) or 'no other package'}"
    box = f'x="{room.x:.1f}" y="{room.y}" width="{ROOM_WIDTH}" height="{FLOOR_HEIGHT}"'
    parts = [f"<g><title>{escape(tooltip)}</title>", f'<rect class="{kind}" {box} rx="7"/>']
    parts.append(f'<text class="name" x="{room.x + 12:.1f}" y="{room.y + 21}">{room.name}</text>')
    lines = textwrap.wrap(role, LETTERS_PER_LINE, max_lines=ROLE_LINES, placeholder=" …")
    for number, line in enumerate(lines):
        y = room.y + 37 + ROLE_PITCH * number
        parts.append(f'<text class="role" x="{room.x + 12:.1f}" y="{y}">{escape(line)}</text>')
    return [*parts, "</g>"]


def draw_legend(y: float) -> list[str]:
    free, arrow = LEFT_WING, LEFT_WING + 190
    return [
        f'<rect class="room free" x="{free}" y="{y - 12}" width="22" height="14" rx="3"/>',
        f'<text class="note" x="{free + 30}" y="{y}">never imports torch</text>',
        f'<path class="arrow" d="M{arrow},{y - 5} h24"/>',
        f'<path class="head" d="M{arrow + 24},{y - 8} v6 l6,-3 z"/>',
        f'<text class="note" x="{arrow + 38}" y="{y}">imports; arrows that a longer way implies are left out</text>',
    ]


def architecture_svg(root: Path = ROOT) -> str:
    graph = package_imports(root)
    rooms = place_rooms(set(graph))
    roles = roles_in_readme()
    height = floor_top(0) + FLOOR_HEIGHT + FOOT
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [f'{frame} role="img" aria-label="The packages of moefold on their floors">', f"<style>{STYLE}</style>"]
    parts.append(f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fbfcfe"/>')
    parts += draw_floors()
    parts += draw_arrows(without_implied(graph), rooms)
    for name, room in rooms.items():
        parts += draw_room(room, role_of(root / name, roles), graph[name])
    parts += draw_legend(height - 18)
    return "\n".join([*parts, "</svg>", ""])


def main(path: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(architecture_svg(), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
