"""SVG drawing of a simulated program: one row per rank, time to the right, one box per op with its microbatch.

rank 0  [0][1][2][3]         [0   ][4][1   ][5]...     blue F, green D, amber W; later chunks are lighter
rank 1     [0][1][2]      [0   ][3][1   ][4]...        grey is bubble; a frame marks a pair
"""

from __future__ import annotations

import math
from html import escape

from moefold.schedule.program import Program, is_paired, rank_by_stage
from moefold.schedule.simulate_program import LaneInterval, SlotSpan, Timeline, lane_intervals
from moefold.schedule.stage_costs import StageCosts

OP_COLOURS = {
    "F": (49, 104, 189),
    "D": (30, 132, 90),
    "W": (222, 148, 20),
}
COMM_COLOUR = "#b0388f"
OP_NAMES = {"F": "forward", "D": "data gradient", "W": "weight gradient"}
LEFT = 66
RIGHT = 84
TOP = 58
BAND = 26  # height of a rank's compute lane
WIRE = 7  # height of its communication lane
GAP = 8
MIN_WIDTH = 760
MAX_TIME_PIXELS = 1500  # pixels for time; boxes are drawn narrower before the page gets wider
MIN_OP_PIXELS = 18  # wide enough for a microbatch's number
TICK_PIXELS = 80
DARK_INK = "#1b1f24"
SVG_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b1f24}.title{font-size:15px;font-weight:600}.quiet{fill:#5b6470}"
    ".idle{fill:#eceff3}.op{stroke:#fff;stroke-width:.8}.in{font-size:11px;text-anchor:middle}"
    ".pair{fill:none;stroke:#1b1f24;stroke-width:1.6}.tick{stroke:#9aa3ad}"
)


def draw_timeline(program: Program, timeline: Timeline, costs: StageCosts, title: str) -> str:
    """The drawing as SVG text. Every box has a tooltip with its op, its start and its end."""
    scale = pixels_per_second(timeline, costs)
    communicates = any(map(any, costs.comm.values()))
    height = BAND
    if communicates:
        height += WIRE
    row = height + GAP
    bottom = TOP + row * len(program)
    chunks = chunk_of_stages(program)

    body = [draw_heading(timeline, title)]
    for rank in range(len(program)):
        y = TOP + rank * row
        body.append(draw_rank_row(rank, timeline, y, height, scale))
    for span in timeline.spans:
        y = TOP + span.rank * row
        for part in lane_intervals(span, costs):
            chunk = chunks[part.op.stage]
            body.append(draw_op_box(part, y, scale, chunk))
    # Frames lie over the boxes of their pair.
    pairs = [span for span in timeline.spans if is_paired(span.slot)]
    for span in pairs:
        y = TOP + span.rank * row
        body.append(draw_pair_frame(span, y, height, scale))
    body.append(draw_time_axis(timeline.makespan, bottom, scale))
    several_chunks = max(chunks) > 0
    legend_y = bottom + 40
    body.append(draw_legend(legend_y, several_chunks, communicates, bool(pairs)))

    width = LEFT + math.ceil(timeline.makespan * scale) + RIGHT
    return svg_document(max(width, MIN_WIDTH), bottom + 62, body)


def pixels_per_second(timeline: Timeline, costs: StageCosts) -> float:
    """Pixels per unit of time: enough to write into the shortest op, as far as the page allows."""
    durations: list[float] = []
    for of_kind in costs.compute.values():
        durations += [seconds for seconds in of_kind if seconds > 0]
    shortest = min(durations, default=1.0)
    makespan = timeline.makespan or 1.0
    return min(MIN_OP_PIXELS / shortest, MAX_TIME_PIXELS / makespan)


def chunk_of_stages(program: Program) -> list[int]:
    """For each stage, the number of earlier stages on its rank."""
    homes = rank_by_stage(program)
    chunks: list[int] = []
    for stage, rank in enumerate(homes):
        earlier = homes[:stage]
        chunks.append(earlier.count(rank))
    return chunks


def draw_heading(timeline: Timeline, title: str) -> str:
    share = sum(timeline.bubble) / len(timeline.bubble)
    facts = f"makespan {timeline.makespan:g}, bubble {share:.1%}"
    exposed = max(timeline.exposed)
    if exposed > 1e-9:
        facts += f", exposed communication {exposed:g}"
    return (
        f'<text x="{LEFT}" y="22" class="title">{escape(title)}</text>'
        f'<text x="{LEFT}" y="42" class="quiet">{escape(facts)}</text>'
    )


def draw_rank_row(rank: int, timeline: Timeline, y: float, height: float, scale: float) -> str:
    """Row of a rank: its name, grey idle time, and its largest number of live microbatches."""
    end = LEFT + timeline.makespan * scale
    width = end - LEFT
    middle = y + BAND / 2 + 4
    return (
        f'<text x="{LEFT - 10}" y="{middle:g}" text-anchor="end">rank {rank}</text>'
        f'<rect x="{LEFT}" y="{y:g}" width="{width:.2f}" height="{height:g}" class="idle"/>'
        f'<text x="{end + 10:.2f}" y="{middle:g}" class="quiet">{timeline.live[rank]} live</text>'
    )


def draw_op_box(part: LaneInterval, y: float, scale: float, chunk: int) -> str:
    x = LEFT + part.start * scale
    width = (part.end - part.start) * scale
    if part.lane == "comm":
        tip = f"<title>{part.op} communication: {part.start:g} to {part.end:g}</title>"
        top = y + BAND + 1
        box = f'<rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{WIRE - 1}" fill="{COMM_COLOUR}">'
        return f"{box}{tip}</rect>"
    tip = f"<title>{part.op}: {part.start:g} to {part.end:g}</title>"
    fill, ink = op_colour_and_ink(part.op.kind, chunk)
    box = f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{BAND}" fill="{fill}" class="op">{tip}</rect>'
    label = str(part.op.microbatch)
    if width < 7 * len(label) + 3:
        return box
    centre = x + width / 2
    baseline = y + BAND / 2 + 4
    return f'{box}<text x="{centre:.2f}" y="{baseline:g}" class="in" style="fill:{ink}">{label}</text>'


def op_colour_and_ink(kind: str, chunk: int) -> tuple[str, str]:
    """The colour of a kind, lighter for later chunks, and an ink that is legible on it."""
    towards_white = 1 - 0.58 ** min(chunk, 3)

    def lighten(channel: int) -> int:
        return round(channel + (255 - channel) * towards_white)

    red, green, blue = map(lighten, OP_COLOURS[kind])
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    ink = "#fff" if brightness < 140 else DARK_INK
    return f"#{red:02x}{green:02x}{blue:02x}", ink


def draw_pair_frame(span: SlotSpan, y: float, height: float, scale: float) -> str:
    x = LEFT + span.start * scale
    width = (span.end - span.start) * scale
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" class="pair"/>'


def draw_time_axis(makespan: float, y: float, scale: float) -> str:
    """Ticks at a round distance, about eighty pixels apart."""
    rough = TICK_PIXELS / scale
    power = 10 ** math.floor(math.log10(rough))
    round_steps = [power * n for n in (1, 2, 5, 10)]
    step = next(size for size in round_steps if size >= rough)
    axis = ""
    for tick in range(int(makespan / step) + 1):
        seconds = tick * step
        x = LEFT + seconds * scale
        axis += f'<path d="M{x:.2f} {y}v5" class="tick"/>'
        axis += f'<text x="{x:.2f}" y="{y + 17}" class="quiet" text-anchor="middle">{seconds:g}</text>'
    return axis


def draw_legend(y: float, several_chunks: bool, communicates: bool, pairs: bool) -> str:
    """The meaning of each colour that is drawn."""
    entries: list[tuple[str, str]] = []
    for kind, name in OP_NAMES.items():
        colour, _ = op_colour_and_ink(kind, 0)
        entries.append((f'fill="{colour}"', f"{kind} {name}"))
    if several_chunks:
        lighter, _ = op_colour_and_ink("F", 1)
        entries.append((f'fill="{lighter}"', "lighter: later chunk of its rank"))
    if communicates:
        entries.append((f'fill="{COMM_COLOUR}"', "communication"))
    if pairs:
        entries.append(('class="pair"', "pair, interleaved"))
    entries.append(('class="idle"', "idle"))

    x = LEFT
    legend = ""
    for style, label in entries:
        legend += f'<rect x="{x}" y="{y - 10}" width="13" height="13" {style}/>'
        legend += f'<text x="{x + 18}" y="{y + 1}">{label}</text>'
        x += 18 + round(6.4 * len(label)) + 20
    return legend


def svg_document(width: float, height: float, body: list[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<style>{SVG_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
