"""Stage layouts: the pieces of the model on each stage, as one string: `Et*3|(tt|)*29m|L`.

    E   the embedding                          |       next stage
    t   a transformer layer, of either kind    x*3     the piece x three times
    d   a transformer layer that is dense      (..)*n  the part in parentheses n times
    m   a multi-token-prediction (MTP) layer
    L   the final norm, the head and the loss

Layers are in the model's order, so a letter needs no number: the first `t` is layer 0. Whether a layer is dense or MoE
follows from its index (`model.moe.dense_layers`); `t` stands for both, as in published strings. `d` marks a dense layer
explicitly: it is checked against the model, and costs by piece can differ between the two.

    Et*3|(tt|)*29m|L     32 stages:   Ettt | tt | tt | ... | tt | m | L
    stage                              0     1    2         29  30  31
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moefold.printable import printable_text
from moefold.schedule.schedule_error import ScheduleError

PIECE_LETTERS = {
    "E": "embedding",
    "d": "dense layer",
    "t": "transformer layer",
    "m": "MTP layer",
    "L": "loss",
}
MAX_LAYOUT_LENGTH = 100_000  # pieces and boundaries of a layout written out
MAX_NESTING = 20  # parentheses in parentheses
REPEAT_PATTERN = re.compile(r"\s*\*\s*([0-9]{1,6})")
RUN_PATTERN = re.compile(r"(.)\1{2,}")  # a letter three times or more
MAX_ORDER_PROBLEMS = 4
PIECE_ORDER = "EtmL"


@dataclass(frozen=True)
class StageLayout:
    """The pieces of each stage, one string per stage: ("Ettt", "tt", ..., "m", "L")."""

    stages: tuple[str, ...]

    def __str__(self) -> str:
        return write_layout(self)

    def layers(self, stage: int) -> range:
        """Transformer layers of a stage, by their index in the model."""
        return self.piece_numbers(stage, "td")

    def mtp_layers(self, stage: int) -> range:
        return self.piece_numbers(stage, "m")

    def piece_numbers(self, stage: int, letters: str) -> range:
        earlier_pieces = "".join(self.stages[:stage])
        first = count_letters(earlier_pieces, letters)
        count = count_letters(self.stages[stage], letters)
        return range(first, first + count)


def count_letters(pieces: str, letters: str) -> int:
    return sum(pieces.count(letter) for letter in letters)


def parse_layout(text: str) -> StageLayout:
    """The layout that a string describes; `check_layout` compares it with a model."""
    shown = printable_text(text)
    opened = text.count("(")
    closed = text.count(")")
    if opened != closed:
        raise ScheduleError(f"layout {shown} has {opened} `(` but {closed} `)`; expected as many")
    pieces, end = expand_repeats(text, 0, 0)
    if end < len(text):
        problem = f"layout {shown} has `)` at character {end + 1} without `(`"
        raise ScheduleError(f"{problem}; remove this `)`")
    return StageLayout(tuple(pieces.split("|")))


def expand_repeats(text: str, position: int, depth: int) -> tuple[str, int]:
    """The string with its repetitions written out, from `position` to the closing parenthesis or the end."""
    expanded = ""
    while position < len(text) and text[position] != ")":
        letter = text[position]
        position += 1
        if letter.isspace():
            continue
        if letter == "(" and depth < MAX_NESTING:
            part, closing = expand_repeats(text, position, depth + 1)
            position = closing + 1
        elif letter in PIECE_LETTERS or letter == "|":
            part = letter
        else:
            raise ScheduleError(unknown_letter_problem(text, letter, position))
        times = 1
        if match := REPEAT_PATTERN.match(text, position):
            times = int(match[1])
            position = match.end()
        expanded += part * times
        check_repetition(text, expanded, times, position)
    return expanded, position


def unknown_letter_problem(text: str, letter: str, position: int) -> str:
    pieces = [f"{key} ({name})" for key, name in PIECE_LETTERS.items()]
    known = ", ".join(pieces)
    shown = printable_text(letter)
    problem = f"layout {printable_text(text)} has {shown!r} as character {position}"
    return f"{problem}; expected {known}, | between stages, ( ) and *n"


def check_repetition(text: str, expanded: str, times: int, position: int) -> None:
    """Refuses a repetition of nothing, and a layout that is too long."""
    if len(expanded) > MAX_LAYOUT_LENGTH:
        problem = f"is longer than {MAX_LAYOUT_LENGTH} pieces"
    elif times < 1:
        problem = "repeats a piece 0 times"
    else:
        return
    shown = printable_text(text)
    raise ScheduleError(f"layout {shown} {problem}, up to character {position}; expected *n with n from 1 on")


def write_layout(layout: StageLayout) -> str:
    """The shortest string for a layout that repeats pieces within a stage and runs of whole stages."""
    texts = [RUN_PATTERN.sub(shorten_run, pieces) for pieces in layout.stages]
    # From the last stage back: one stage by itself, or a repeated run of stages, whichever is shorter.
    last = len(texts) - 1
    shortest = {last: texts[last]}  # by first stage, the shortest string of all stages from there on
    for start in reversed(range(last)):
        choices = [f"{texts[start]}|{shortest[start + 1]}"]
        longest = (last - start) // 2
        for period in range(1, longest + 1):
            times = count_repeats(texts, start, period)
            if times > 1:
                body = "|".join(texts[start : start + period])
                rest = shortest[start + times * period]
                choices.append(f"({body}|)*{times}{rest}")
        shortest[start] = min(choices, key=len)
    return shortest[0]


def shorten_run(run: re.Match[str]) -> str:
    return f"{run[1]}*{len(run[0])}"


def count_repeats(texts: list[str], start: int, period: int) -> int:
    """Number of repetitions of the `period` stages from `start` on, the last stage excluded."""
    last = len(texts) - 1
    body = texts[start : start + period]
    times = 1
    following = start + period
    while following + period <= last and texts[following : following + period] == body:
        times += 1
        following += period
    return times


def stage_layout_problems(
    layout: StageLayout, stages: int, layers: int, dense_layers: int = 0, mtp_layers: int = 0
) -> list[str]:
    """Every reason why a layout does not fit a model with these numbers of layers on pp x vpp = `stages` stages."""
    shown = printable_text(str(layout))
    problems: list[str] = []
    stage_count = len(layout.stages)
    if stage_count != stages:
        expected = f"expected pp x vpp = {stages}: change its `|`, or pp or vpp"
        problems.append(f"layout {shown} has {stage_count} stages; {expected}")
    if "" in layout.stages:
        empty = layout.stages.index("")
        problems.append(f"stage {empty} of layout {shown} is empty; expected a piece: remove a `|`")
    all_pieces = "".join(layout.stages)
    expected_counts = {"E": 1, "td": layers, "m": mtp_layers, "L": 1}
    for letters, expected in expected_counts.items():
        count = count_letters(all_pieces, letters)
        if count > expected:
            difference = f"{count - expected} too many"
        elif count < expected:
            difference = f"{expected - count} missing"
        else:
            continue
        what = describe_letters(letters)
        problems.append(f"layout {shown} has {count} {what}, {difference}; expected {expected}")
    return problems + pieces_out_of_order(layout, dense_layers)


def pieces_out_of_order(layout: StageLayout, dense_layers: int) -> list[str]:
    """Pieces in the wrong order, and layers marked dense that are not dense."""
    problems: list[str] = []
    reached = "E"
    layer = 0
    for stage, pieces in enumerate(layout.stages):
        for piece in pieces:
            kind = "t" if piece == "d" else piece
            if PIECE_ORDER.index(kind) < PIECE_ORDER.index(reached):
                problems.append(order_problem(stage, piece, reached))
            reached = max(kind, reached, key=PIECE_ORDER.index)
            if piece == "d" and layer >= dense_layers:
                fact = f"the model has {dense_layers} dense layers"
                problems.append(f"stage {stage} calls layer {layer} dense (d), but {fact}; write t")
            if kind == "t":
                layer += 1
    return problems[:MAX_ORDER_PROBLEMS]


def order_problem(stage: int, piece: str, reached: str) -> str:
    expected = "expected the embedding first, then layers, then MTP layers, and the loss last: move it"
    return f"stage {stage} has {describe_letters(piece)} behind {describe_letters(reached)}; {expected}"


def describe_letters(letters: str) -> str:
    """t or d (transformer layer)"""
    name = PIECE_LETTERS[letters[0]]
    return f"{' or '.join(letters)} ({name})"


def check_layout(
    layout: StageLayout, stages: int, layers: int, dense_layers: int = 0, mtp_layers: int = 0
) -> StageLayout:
    """Return the layout if it fits the model; otherwise raise ScheduleError with all problems."""
    problems = stage_layout_problems(layout, stages, layers, dense_layers, mtp_layers)
    if problems:
        raise ScheduleError(*problems)
    return layout
