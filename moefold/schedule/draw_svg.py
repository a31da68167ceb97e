"""Draws a clocked program as SVG: one row a rank, time to the right, a box an op, its microbatch written in it.

rank 0  [0][1][2][3]         [0   ][4][1   ][5]...     blue F, green D, amber W; later chunks are lighter
rank 1     [0][1][2]      [0   ][3][1   ][4]...        what is left grey is bubble; a frame joins a pair
"""

from __future__ import annotations

import math
from html import escape

from moefold.schedule.program import Program, is_paired, rank_by_stage
from moefold.schedule.simulate_program import LaneInterval, SlotSpan, Timeline, lane_intervals
from moefold.schedule.stage_costs import StageCosts

OP_COLOURS = {"F": (49, 104, 189), "D": (30, 132, 90), "W": (222, 148, 20)}
COMM_COLOUR = "#b0388f"
OP_NAMES = {"F": "forward", "D": "data gradient", "W": "weight gradient"}
LEFT, RIGHT, TOP, BAND, WIRE, GAP = 66, 84, 58, 26, 7, 8
MAX_TIME_PIXELS = 1500  # pixels for time; boxes are drawn narrower before the page gets wider


def draw_timeline(program: Program, timeline: Timeline, costs: StageCosts, title: str) -> str:
    """The whole page. Every box has a tooltip with its op, its start and its end."""
    scale = pixels_per_second(timeline, costs)
    communicates = any(any(each) for each in costs.comm.values())
    row = BAND + (WIRE if communicates else 0) + GAP
    width = LEFT + math.ceil(timeline.makespan * scale) + RIGHT
    bottom = TOP + row * len(program)
    body = [draw_heading(timeline, title)]
    body += [draw_rank_row(rank, timeline, TOP + rank * row, row - GAP, scale) for rank in range(len(program))]
    chunk = chunk_of_stages(program)
    for span in timeline.spans:
        y = TOP + span.rank * row
        body += [draw_op_box(part, y, scale, chunk[part.op.stage]) for part in lane_intervals(span, costs)]
    pairs = [span for span in timeline.spans if is_paired(span.slot)]
    body += [draw_pair_frame(span, TOP + span.rank * row, row - GAP, scale) for span in pairs]
    body += [draw_time_axis(timeline.makespan, bottom, scale)]
    body += [draw_legend(bottom + 40, max(chunk) > 0, communicates, bool(pairs))]
    return svg_document(max(width, 760), bottom + 62, body)


def pixels_per_second(timeline: Timeline, costs: StageCosts) -> float:
    """Wide enough to write into the shortest op, as far as the page allows."""
    shortest = min((s for kind in costs.compute.values() for s in kind if s > 0), default=1.0)
    return min(18 / shortest, MAX_TIME_PIXELS / (timeline.makespan or 1.0))


def chunk_of_stages(program: Program) -> list[int]:
    """For each stage, how many earlier stages its rank holds."""
    home = rank_by_stage(program)
    return [home[:stage].count(rank) for stage, rank in enumerate(home)]


def draw_heading(timeline: Timeline, title: str) -> str:
    share = sum(timeline.bubble) / len(timeline.bubble)
    facts = f"makespan {timeline.makespan:g}, bubble {share:.1%}"
    facts += f", exposed communication {max(timeline.exposed):g}" if max(timeline.exposed) > 1e-9 else ""
    return (
        f'<text x="{LEFT}" y="22" class="title">{escape(title)}</text>'
        f'<text x="{LEFT}" y="42" class="quiet">{escape(facts)}</text>'
    )


def draw_rank_row(rank: int, timeline: Timeline, y: float, height: float, scale: float) -> str:
    """A rank's row: its name, the grey it leaves idle, the most it holds."""
    end = LEFT + timeline.makespan * scale
    middle = y + BAND / 2 + 4
    return (
        f'<text x="{LEFT - 10}" y="{middle:g}" text-anchor="end">rank {rank}</text>'
        f'<rect x="{LEFT}" y="{y:g}" width="{end - LEFT:.2f}" height="{height:g}" class="idle"/>'
        f'<text x="{end + 10:.2f}" y="{middle:g}" class="quiet">{timeline.live[rank]} live</text>'
    )


def draw_op_box(part: LaneInterval, y: float, scale: float, chunk: int) -> str:
    x, width = LEFT + part.start * scale, (part.end - part.start) * scale
    tip = f"<title>{part.op}{' communication' if part.lane == 'comm' else ''}: {part.start:g} to {part.end:g}</title>"
    if part.lane == "comm":
        return f'<rect x="{x:.2f}" y="{y + BAND + 1:g}" width="{width:.2f}" height="{WIRE - 1}" fill="{COMM_COLOUR}">{tip}</rect>'
    fill, ink = op_colour_and_ink(part.op.kind, chunk)
    rect = f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{BAND}" fill="{fill}" class="op">{tip}</rect>'
    label = str(part.op.microbatch)
    if width < 7 * len(label) + 3:
        return rect
    return rect + f'<text x="{x + width / 2:.2f}" y="{y + BAND / 2 + 4:g}" class="in" style="fill:{ink}">{label}</text>'


def op_colour_and_ink(kind: str, chunk: int) -> tuple[str, str]:
    """The colour of a kind, lighter for later chunks, and an ink that is legible on it."""
    towards_white = 1 - 0.58 ** min(chunk, 3)
    red, green, blue = (round(c + (255 - c) * towards_white) for c in OP_COLOURS[kind])
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return f"#{red:02x}{green:02x}{blue:02x}", "#fff" if dark else "#1b1f24"


def draw_pair_frame(span: SlotSpan, y: float, height: float, scale: float) -> str:
    x, width = LEFT + span.start * scale, (span.end - span.start) * scale
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" class="pair"/>'


def draw_time_axis(makespan: float, y: float, scale: float) -> str:
    """Ticks at a round distance, about eighty pixels apart."""
    rough = 80 / scale
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    ticks = [at * step for at in range(int(makespan / step) + 1)]
    return "".join(
        f'<path d="M{LEFT + t * scale:.2f} {y}v5" class="tick"/>'
        f'<text x="{LEFT + t * scale:.2f}" y="{y + 17}" class="quiet" text-anchor="middle">{t:g}</text>'
        for t in ticks
    )


def draw_legend(y: float, several_chunks: bool, communicates: bool, pairs: bool) -> str:
    """What the colours mean, and only of what is drawn."""
    entries = [(f'fill="{op_colour_and_ink(kind, 0)[0]}"', f"{kind} {says}") for kind, says in OP_NAMES.items()]
    entries += (
        [(f'fill="{op_colour_and_ink("F", 1)[0]}"', "lighter: later chunk of its rank")] if several_chunks else []
    )
    entries += [(f'fill="{COMM_COLOUR}"', "communication")] if communicates else []
    entries += [('class="pair"', "a pair, woven")] if pairs else []
    entries += [('class="idle"', "idle")]
    x, out = LEFT, ""
    for style, says in entries:
        out += (
            f'<rect x="{x}" y="{y - 10}" width="13" height="13" {style}/><text x="{x + 18}" y="{y + 1}">{says}</text>'
        )
        x += 18 + round(6.4 * len(says)) + 20
    return out


def svg_document(width: float, height: float, body: list[str]) -> str:
    style = (
        "text{font:12px system-ui,sans-serif;fill:#1b1f24}.title{font-size:15px;font-weight:600}.quiet{fill:#5b6470}"
        ".idle{fill:#eceff3}.op{stroke:#fff;stroke-width:.8}.in{font-size:11px;text-anchor:middle}"
        ".pair{fill:none;stroke:#1b1f24;stroke-width:1.6}.tick{stroke:#9aa3ad}"
    )
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n<style>{style}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{inside}\n</svg>\n'
    )
