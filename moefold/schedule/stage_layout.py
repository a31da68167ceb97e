"""Which piece of the model lies on which stage, as one string: `Et*3|(tt|)*29m|L`.

    E   the embedding                          |       next stage
    t   a transformer layer, of either kind    x*3     the piece x three times
    d   a transformer layer that is dense      (..)*n  what is inside, n times
    m   a multi-token-prediction (MTP) layer
    L   the final norm, the head and the loss

Layers come in the model's order, so a letter needs no number: the first `t` is layer 0. Whether a layer is dense or
MoE follows from its index (`model.moe.dense_layers`), and `t` is right for both, as in published strings. Who writes
`d` says so explicitly: it is checked against the model, and costs given by piece can tell the two apart.

    Et*3|(tt|)*29m|L     32 stages:   Ettt | tt | tt | ... | tt | m | L
    stage                              0     1    2         29  30  31
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moefold.schedule.schedule_error import ScheduleError, printable_excerpt

PIECE_LETTERS = {"E": "embedding", "d": "dense layer", "t": "transformer layer", "m": "MTP layer", "L": "loss"}
MAX_LAYOUT_LENGTH = 100_000  # pieces and boundaries of a layout written out
MAX_NESTING = 20  # parentheses in parentheses


@dataclass(frozen=True)
class StageLayout:
    """The pieces of each stage, one string a stage: ("Ettt", "tt", ..., "m", "L")."""

    stages: tuple[str, ...]

    def __str__(self) -> str:
        return write_layout(self)

    def layers(self, stage: int) -> range:
        """The transformer layers a stage holds, by their index in the model."""
        return self.span(stage, "td")

    def mtp_layers(self, stage: int) -> range:
        return self.span(stage, "m")

    def span(self, stage: int, letters: str) -> range:
        before = count_letters("".join(self.stages[:stage]), letters)
        return range(before, before + count_letters(self.stages[stage], letters))


def count_letters(pieces: str, letters: str) -> int:
    return sum(pieces.count(letter) for letter in letters)


def parse_layout(text: str) -> StageLayout:
    """The layout a string describes, whatever the model; `check` holds it against one."""
    if text.count("(") != text.count(")"):
        raise ScheduleError(
            f"layout {printable_excerpt(text)} has {text.count('(')} `(` but {text.count(')')} `)`; expected as many"
        )
    pieces, end = expand_repeats(text, 0, 0)
    if end < len(text):
        raise ScheduleError(
            f"layout {printable_excerpt(text)} closes at character {end + 1} what was not opened; remove this `)`"
        )
    return StageLayout(tuple(pieces.split("|")))


def expand_repeats(text: str, at: int, depth: int) -> tuple[str, int]:
    """The string with its repetitions written out, from `at` to the closing parenthesis or the end."""
    out = ""
    while at < len(text) and text[at] != ")":
        letter, at = text[at], at + 1
        if letter.isspace():
            continue
        if letter == "(" and depth < MAX_NESTING:
            part, at = expand_repeats(text, at, depth + 1)
            at += 1
        elif letter in PIECE_LETTERS or letter == "|":
            part = letter
        else:
            raise ScheduleError(
                f"layout {printable_excerpt(text)} has {printable_excerpt(letter)!r} as character {at}; expected "
                + ", ".join(f"{key} ({what})" for key, what in PIECE_LETTERS.items())
                + ", | between stages, ( ) and *n"
            )
        times = re.compile(r"\s*\*\s*([0-9]{1,6})").match(text, at)
        if times:
            at = times.end()
        out += part * (int(times[1]) if times else 1)
        if len(out) > MAX_LAYOUT_LENGTH or (times and int(times[1]) < 1):
            problem = (
                "repeats a piece 0 times"
                if len(out) <= MAX_LAYOUT_LENGTH
                else f"is longer than {MAX_LAYOUT_LENGTH} pieces"
            )
            raise ScheduleError(
                f"layout {printable_excerpt(text)} {problem}, up to character {at}; expected *n with n from 1 on"
            )
    return out, at


def write_layout(layout: StageLayout) -> str:
    """The shortest string for a layout that repeats pieces within a stage and runs of whole stages."""
    texts = [re.sub(r"(.)\1{2,}", lambda run: f"{run[1]}*{len(run[0])}", pieces) for pieces in layout.stages]
    last = len(texts) - 1
    best = {last: texts[last]}
    for at in reversed(range(last)):
        choices = [f"{texts[at]}|{best[at + 1]}"]
        for period in range(1, (last - at) // 2 + 1):
            times = 1
            body = texts[at : at + period]
            while at + (times + 1) * period <= last and texts[at + times * period : at + (times + 1) * period] == body:
                times += 1
            if times > 1:
                choices.append(f"({'|'.join(body)}|)*{times}{best[at + times * period]}")
        best[at] = min(choices, key=len)
    return best[0]


def stage_layout_problems(
    layout: StageLayout, stages: int, layers: int, dense_layers: int = 0, mtp_layers: int = 0
) -> list[str]:
    """Every reason why a layout does not fit a model of so many layers on pp x vpp = `stages` stages."""
    flat = "".join(layout.stages)
    problems: list[str] = []
    if len(layout.stages) != stages:
        problems.append(
            f"layout {printable_excerpt(str(layout))} has {len(layout.stages)} stages; expected pp x vpp = {stages}: "
            f"change its `|`, or pp or vpp"
        )
    if empty := [at for at, pieces in enumerate(layout.stages) if not pieces]:
        problems.append(
            f"stage {empty[0]} of layout {printable_excerpt(str(layout))} is empty; expected a piece: remove a `|`"
        )
    for letters, expected in (("E", 1), ("td", layers), ("m", mtp_layers), ("L", 1)):
        found = count_letters(flat, letters)
        if found != expected:
            amiss = f"{found - expected} too many" if found > expected else f"{expected - found} missing"
            problems.append(
                f"layout {printable_excerpt(str(layout))} has {found} {describe_letters(letters)}, {amiss}; expected {expected}"
            )
    return problems + pieces_out_of_order(layout, dense_layers)


def pieces_out_of_order(layout: StageLayout, dense_layers: int) -> list[str]:
    """Pieces that stand before one they need, and layers called dense that are not."""
    problems: list[str] = []
    order, reached, layer = "EtmL", "E", 0
    for at, pieces in enumerate(layout.stages):
        for piece in pieces:
            kind = "t" if piece == "d" else piece
            if order.index(kind) < order.index(reached):
                problems.append(
                    f"stage {at} has {describe_letters(piece)} behind {describe_letters(reached)}; expected the embedding first, then "
                    f"layers, then MTP layers, and the loss last: move it"
                )
            reached = max(kind, reached, key=order.index)
            if piece == "d" and layer >= dense_layers:
                problems.append(
                    f"stage {at} calls layer {layer} dense (d), but the model has {dense_layers} dense layers; write t"
                )
            layer += kind == "t"
    return problems[:4]


def describe_letters(letters: str) -> str:
    """t or d (transformer layer)"""
    return f"{' or '.join(letters)} ({PIECE_LETTERS[letters[0]]})"


def check_layout(
    layout: StageLayout, stages: int, layers: int, dense_layers: int = 0, mtp_layers: int = 0
) -> StageLayout:
    """Return the layout if it fits the model; otherwise raise Unsound with all that does not."""
    if problems := stage_layout_problems(layout, stages, layers, dense_layers, mtp_layers):
        raise ScheduleError(*problems)
    return layout
