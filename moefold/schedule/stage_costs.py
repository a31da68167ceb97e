"""What one microbatch costs on each stage, in seconds and bytes, and how a person writes it down.

    F: 1.0                       # a number: a rank's whole share, which its vpp stages split evenly
    D: [1, 1, 1.5, 2]            # a list: one number a stage, all pp x vpp of them
    W: {E: 0, d: 0.7, t: 1, m: 1.6, L: 0.5}    # by piece of the layout, which must then be given
    comm: {F: 0.4, D: 0.4}       # expert communication inside a stage, each a number, a list or a mapping as above
    send: 0.05                   # one message between stages of different ranks, sent while both compute
    bytes:
      saved: 2.0e9               # what a forward keeps for its backward
      held: 0.5e9                # the part of it that stays until W; all of it if left out

What is left out is 1 for F, D and W and 0 for the rest.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from moefold.schedule.program import PipelineOp
from moefold.schedule.schedule_error import ScheduleError, printable_excerpt
from moefold.schedule.stage_layout import PIECE_LETTERS, StageLayout


@dataclass(frozen=True)
class StageCosts:
    """By kind and stage: seconds of compute and of communication; by stage: bytes saved by F, and held until W. What
    a paired slot hides slows it still by its share `friction`: communication's kernels take a part of the device."""

    compute: Mapping[str, Sequence[float]]
    comm: Mapping[str, Sequence[float]]
    send: float
    saved: Sequence[float]
    held: Sequence[float]
    friction: float = 0.0

    def seconds(self, op: PipelineOp) -> float:
        return self.compute[op.kind][op.stage]

    def travel(self, op: PipelineOp) -> float:
        """Seconds of communication inside the op."""
        return self.comm[op.kind][op.stage]


def uniform_costs(stages: int, chunks: int = 1, comm: float = 0.0) -> StageCosts:
    """F = D = W = 1 for a rank's share of a microbatch, split evenly over its chunks; `comm` likewise in F and D."""
    each, nothing = [1 / chunks] * stages, [0.0] * stages
    travel = {"F": [comm / chunks] * stages, "D": [comm / chunks] * stages, "W": nothing}
    return StageCosts(dict.fromkeys(("F", "D", "W"), each), travel, 0.0, nothing, nothing)


def read_stage_costs(
    tree: Mapping[str, Any], stages: int, chunks: int, layout: StageLayout | None = None
) -> StageCosts:
    """The costs a mapping describes, laid over the defaults; Unsound with all its problems at once."""
    return StageCostsReader(stages, chunks, layout).read(tree)


class StageCostsReader:
    """Reads the entries of a table of costs and collects what is wrong with them."""

    def __init__(self, stages: int, chunks: int, layout: StageLayout | None):
        self.stages, self.chunks, self.layout = stages, chunks, layout
        self.problems: list[str] = []

    def read(self, tree: Mapping[str, Any]) -> StageCosts:
        self.check_names(tree, ("F", "D", "W", "comm", "send", "bytes"), "")
        comm, size = (
            self.read_section(tree, "comm", ("F", "D", "W")),
            self.read_section(tree, "bytes", ("saved", "held")),
        )
        base = uniform_costs(self.stages, self.chunks)
        saved = self.values(size, "saved", "bytes.", base.saved)
        costs = replace(
            base,
            compute={kind: self.values(tree, kind, "", base.compute[kind]) for kind in base.compute},
            comm={kind: self.values(comm, kind, "comm.", base.comm[kind]) for kind in base.comm},
            send=self.number(tree["send"], "send") if "send" in tree else 0.0,
            saved=saved,
            held=self.values(size, "held", "bytes.", saved),
        )
        over = [s for s in range(self.stages) if costs.held[s] > costs.saved[s]]
        if over and not self.problems:
            self.problems.append(
                f"bytes.held is {costs.held[over[0]]:g} on stage {over[0]}, more than bytes.saved, "
                f"{costs.saved[over[0]]:g}, of which it is a part; lower held or raise saved"
            )
        if self.problems:
            raise ScheduleError(*self.problems)
        return costs

    def check_names(self, tree: Mapping[str, Any], names: Sequence[str], prefix: str) -> None:
        for name in tree:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
                guess = f' (did you mean "{prefix}{near[0]}"?)' if near else ""
                self.problems.append(
                    f'no cost "{printable_excerpt(prefix + str(name))}"{guess}; there are: {", ".join(prefix + n for n in names)}'
                )

    def read_section(self, tree: Mapping[str, Any], name: str, names: Sequence[str]) -> Mapping[str, Any]:
        value = tree.get(name, {})
        if not isinstance(value, Mapping):
            self.problems.append(
                f"{name} = {printable_excerpt(str(value))}; expected a mapping, such as {{{names[0]}: 0.5}}"
            )
            return {}
        inside = cast(Mapping[str, Any], value)
        self.check_names(inside, names, name + ".")
        return inside

    def values(self, tree: Mapping[str, Any], name: str, prefix: str, default: Sequence[float]) -> Sequence[float]:
        """One number a stage, from a number, a list or a mapping by piece."""
        if name not in tree:
            return default
        raw: Any = tree[name]
        path = prefix + name
        if isinstance(raw, list):
            numbers = cast(list[Any], raw)
            if len(numbers) != self.stages:
                self.problems.append(
                    f"{path} has {len(numbers)} numbers; expected {self.stages}, one for each of the pp x vpp stages"
                )
                return default
            return [self.number(each, f"{path}[{at}]") for at, each in enumerate(numbers)]
        if isinstance(raw, Mapping):
            return self.values_by_piece(cast(Mapping[str, Any], raw), path, default)
        return [self.number(raw, path) / self.chunks] * self.stages

    def values_by_piece(self, raw: Mapping[str, Any], path: str, default: Sequence[float]) -> Sequence[float]:
        """Each stage costs the sum of its pieces; a piece that is not named costs nothing."""
        if self.layout is None:
            self.problems.append(
                f"{path} is given by piece, but there is no layout; add one, or give a number or a list"
            )
            return default
        self.check_names(raw, list(PIECE_LETTERS), path + ".")
        price = {piece: self.number(raw[piece], f"{path}.{piece}") for piece in PIECE_LETTERS if piece in raw}
        return [sum(price.get(piece, 0.0) for piece in stage) for stage in self.layout.stages]

    def number(self, raw: Any, path: str) -> float:
        try:  # YAML reads 2e9, without a sign in the exponent, as a text
            value = float(raw) if isinstance(raw, int | float | str) and not isinstance(raw, bool) else math.nan
        except (ValueError, OverflowError):
            value = math.nan
        if not 0 <= value <= 1e30:
            self.problems.append(
                f"{path} = {printable_excerpt(str(raw))} is not legal; expected a number at least 0, such as 1.5"
            )
            return 0.0
        return value
