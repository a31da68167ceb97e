"""Costs of one microbatch on each pipeline stage, in seconds and bytes, and their form in a YAML file.

    F: 1.0                       # a number: for a rank, split evenly over its vpp stages
    D: [1, 1, 1.5, 2]            # a list: one number for each of the pp x vpp stages
    W: {E: 0, d: 0.7, t: 1, m: 1.6, L: 0.5}    # by piece of the layout, which must then be given
    comm: {F: 0.4, D: 0.4}       # expert communication inside a stage, each a number, a list or a mapping as above
    send: 0.05                   # one message between stages of different ranks, sent while both compute
    bytes:
      saved: 2.0e9               # saved by a forward for its backward
      held: 0.5e9                # the part of `saved` that is held until W; by default all of it

Missing entries are 1 for F, D and W and 0 for the rest.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from moefold.printable import printable_text
from moefold.schedule.program import OP_KINDS, PipelineOp
from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.stage_layout import PIECE_LETTERS, StageLayout

COST_NAMES = (*OP_KINDS, "comm", "send", "bytes")
BYTES_NAMES = ("saved", "held")
MAX_COST = 1e30

CostTree = Mapping[str, Any]
StageValues = Sequence[float]  # one number a stage


@dataclass(frozen=True)
class StageCosts:
    """Costs by kind of op and stage: seconds of compute and of communication; by stage: bytes saved by F, and held
    until W. `friction`: share of overlapped communication that a paired slot still takes, since its kernels occupy
    SMs."""

    compute: Mapping[str, StageValues]
    comm: Mapping[str, StageValues]
    send: float
    saved: StageValues
    held: StageValues
    friction: float = 0.0

    def compute_seconds(self, op: PipelineOp) -> float:
        return self.compute[op.kind][op.stage]

    def comm_seconds(self, op: PipelineOp) -> float:
        """Seconds of communication inside the op."""
        return self.comm[op.kind][op.stage]


def uniform_costs(stages: int, chunks: int = 1, comm: float = 0.0) -> StageCosts:
    """Costs of F = D = W = 1 for a rank and microbatch, split evenly over its chunks; `comm` likewise in F and D."""
    zeros = [0.0] * stages
    compute_share = [1 / chunks] * stages
    comm_share = [comm / chunks] * stages
    compute: dict[str, StageValues] = dict.fromkeys(OP_KINDS, compute_share)
    comm_by_kind = {"F": comm_share, "D": comm_share, "W": zeros}
    return StageCosts(compute, comm_by_kind, 0.0, zeros, zeros)


def read_stage_costs(tree: CostTree, stages: int, chunks: int, layout: StageLayout | None = None) -> StageCosts:
    """The costs that a mapping describes, merged into the defaults; ScheduleError with all its problems at once."""
    reader = StageCostsReader(stages, chunks, layout)
    return reader.read_costs(tree)


class StageCostsReader:
    """A reader of a table of costs, which collects the problems of its entries."""

    def __init__(self, stages: int, chunks: int, layout: StageLayout | None):
        self.stages = stages
        self.chunks = chunks
        self.layout = layout
        self.problems: list[str] = []

    def read_costs(self, tree: CostTree) -> StageCosts:
        self.check_names(tree, COST_NAMES, "")
        comm_tree = self.read_section(tree, "comm", OP_KINDS)
        bytes_tree = self.read_section(tree, "bytes", BYTES_NAMES)
        base = uniform_costs(self.stages, self.chunks)
        saved = self.stage_values(bytes_tree, "saved", "bytes.", base.saved)
        compute: dict[str, StageValues] = {}
        comm: dict[str, StageValues] = {}
        for kind in OP_KINDS:
            default_compute = base.compute[kind]
            default_comm = base.comm[kind]
            compute[kind] = self.stage_values(tree, kind, "", default_compute)
            comm[kind] = self.stage_values(comm_tree, kind, "comm.", default_comm)
        text = tree.get("send", 0.0)
        send = self.read_number(text, "send")
        held = self.stage_values(bytes_tree, "held", "bytes.", saved)
        if not self.problems:
            self.check_held_within_saved(held, saved)
        if self.problems:
            raise ScheduleError(*self.problems)
        return StageCosts(compute, comm, send, saved, held)

    def check_held_within_saved(self, held: StageValues, saved: StageValues) -> None:
        """Reports the first stage that holds more until W than F saved."""
        both = zip(held, saved, strict=False)
        for stage, (part, whole) in enumerate(both):
            if part > whole:
                excess = f"bytes.held is {part:g} on stage {stage}, more than bytes.saved, {whole:g}"
                self.problems.append(f"{excess}, of which it is a part; lower held or raise saved")
                return

    def check_names(self, tree: CostTree, names: Sequence[str], prefix: str) -> None:
        known = ", ".join(prefix + name for name in names)
        for name in tree:
            if name in names:
                continue
            text = str(name)
            guess = ""
            close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
            if close:
                guess = f' (did you mean "{prefix}{close[0]}"?)'
            shown = printable_text(prefix + text)
            self.problems.append(f'no cost "{shown}"{guess}; there are: {known}')

    def read_section(self, tree: CostTree, name: str, names: Sequence[str]) -> CostTree:
        value = tree.get(name, {})
        if not isinstance(value, Mapping):
            shown = printable_text(str(value))
            example = f"{{{names[0]}: 0.5}}"
            self.problems.append(f"{name} = {shown}; expected a mapping, such as {example}")
            return {}
        section = cast(CostTree, value)
        self.check_names(section, names, name + ".")
        return section

    def stage_values(self, tree: CostTree, name: str, prefix: str, default: StageValues) -> StageValues:
        """One number a stage, from a number, a list or a mapping by piece."""
        if name not in tree:
            return default
        raw: Any = tree[name]
        path = prefix + name
        if isinstance(raw, list):
            numbers = cast(list[Any], raw)
            return self.values_by_stage(numbers, path, default)
        if isinstance(raw, Mapping):
            by_piece = cast(CostTree, raw)
            return self.values_by_piece(by_piece, path, default)
        share = self.read_number(raw, path) / self.chunks
        return [share] * self.stages

    def values_by_stage(self, numbers: list[Any], path: str, default: StageValues) -> StageValues:
        if len(numbers) != self.stages:
            expected = f"expected {self.stages}, one for each of the pp x vpp stages"
            self.problems.append(f"{path} has {len(numbers)} numbers; {expected}")
            return default
        values: list[float] = []
        for stage, raw in enumerate(numbers):
            value = self.read_number(raw, f"{path}[{stage}]")
            values.append(value)
        return values

    def values_by_piece(self, raw: CostTree, path: str, default: StageValues) -> StageValues:
        """Costs of stages: the sum over their pieces; a piece that is not named has cost 0."""
        if self.layout is None:
            problem = f"{path} is given by piece, but there is no layout"
            self.problems.append(f"{problem}; add one, or give a number or a list")
            return default
        letters = list(PIECE_LETTERS)
        self.check_names(raw, letters, path + ".")
        costs = dict.fromkeys(letters, 0.0)
        for piece in letters:
            if piece in raw:
                number = raw[piece]
                costs[piece] = self.read_number(number, f"{path}.{piece}")
        values: list[float] = []
        for pieces in self.layout.stages:
            piece_costs = map(costs.__getitem__, pieces)
            values.append(sum(piece_costs))
        return values

    def read_number(self, raw: Any, path: str) -> float:
        value = float_or_nan(raw)
        if 0 <= value <= MAX_COST:
            return value
        shown = printable_text(str(raw))
        self.problems.append(f"{path} = {shown} is not legal; expected a number at least 0, such as 1.5")
        return 0.0


def float_or_nan(raw: Any) -> float:
    """A number or its text as a float. YAML reads 2e9, without a sign in the exponent, as a text."""
    is_text_or_number = isinstance(raw, int | float | str)
    if isinstance(raw, bool) or not is_text_or_number:
        return math.nan
    try:
        return float(raw)
    except (ValueError, OverflowError):
        return math.nan
