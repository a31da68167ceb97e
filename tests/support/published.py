"""Published throughput, as the planner would have predicted it.

    python -m tests.support.published            prints the tables of docs/planner.md
    python -m tests.support.published --write    writes moefold/plan/gpus/judged.csv, the error bands of the planner

A software stack is one release of one source in one family of precision; it gets one factor, the mean log of measured
over predicted of its other configurations: never of the row that is judged, nor of another run of the same
configuration. Rows are in `published_rows.py`.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean, median

from moefold.config.run import Config
from moefold.plan.error_band import JUDGED, ErrorBand, band_lines, family_of
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import time_training_step
from tests.support.published_rows import (
    DENSE,
    KNOBS,
    LAYOUT,
    PRECISION,
    Row,
    measured_tokens,
    model_of,
    planned,
    rows,
    why_not,
)

OWN_RUNS = Path(__file__).parents[2] / "docs" / "benchmarks" / "plan-h200.json"


@dataclass(frozen=True)
class Judged:
    """A row with what was measured and what the planner says by itself, in tokens a second and GPU."""

    row: Row
    measured: float
    predicted: float

    @property
    def configuration(self) -> tuple[str, ...]:
        return tuple(self.row[key] for key in ("model", "gpu", "precision", *LAYOUT, *KNOBS))

    @property
    def layout(self) -> tuple[str, ...]:
        return tuple(self.row[key] for key in LAYOUT)

    @property
    def release(self) -> str:
        source, rest = self.row["id"].split("-")[:2]
        return f"{source}-{rest}" if source == "mb" and rest[:1].isdigit() else source

    @property
    def family(self) -> str:
        return family_of(PRECISION[self.row["precision"]])

    @property
    def stack(self) -> tuple[str, str]:
        return self.release, self.family

    @property
    def error(self) -> float:
        """Of the planner by itself: predicted over measured, less one."""
        return self.predicted / self.measured - 1


@cache
def tokens_per_second(config: Config, choices: PlanChoices, gpu: str, gpus: int) -> float:
    seconds = time_training_step(build_run_setting(config, gpus, choices), find_gpu_by_name(gpu)).seconds
    return config.train.global_batch * config.data.seq_len / gpus / seconds


def judge(row: Row) -> Judged:
    model = model_of(row)
    assert model, row["model"]
    config, choices = planned(row, model)
    predicted = tokens_per_second(config, choices, row["gpu"], int(row["n_gpus"]))
    return Judged(row, measured_tokens(row, config), predicted)


@cache
def judged() -> tuple[Judged, ...]:
    """Every row of a MoE that can be judged."""
    return tuple(judge(row) for row in rows() if not why_not(row) and row["model"] not in DENSE)


@cache
def judged_dense() -> tuple[Judged, ...]:
    return tuple(judge(row) for row in rows() if not why_not(row) and row["model"] in DENSE)


def left_out() -> dict[str, str]:
    """The ids of rows that cannot be judged, with the reason."""
    return {row["id"]: reason for row in rows() if (reason := why_not(row))}


def factor(one: Judged, every: tuple[Judged, ...]) -> float:
    """Of the row's software stack, fitted without its configuration; 1 where the stack has no other."""
    others = [o for o in every if o.stack == one.stack and o.configuration != one.configuration]
    return math.exp(mean(math.log(o.measured / o.predicted) for o in others)) if others else 1.0


def errors(every: tuple[Judged, ...]) -> list[float]:
    """Of each row, held out: predicted over measured, less one."""
    return [one.predicted * factor(one, every) / one.measured - 1 for one in every]


def pairs(every: tuple[Judged, ...]) -> Iterator[tuple[Judged, Judged]]:
    """Two layouts of the same model, GPU, precision, length and release that differ by more than 1 % in speed."""
    for a, b in combinations(every, 2):
        same = all(a.row[key] == b.row[key] for key in ("model", "gpu", "precision", "seq_len"))
        if same and a.stack == b.stack and a.layout != b.layout and abs(a.measured / b.measured - 1) > 0.01:
            yield a, b


def right(a: Judged, b: Judged) -> bool:
    return (a.measured > b.measured) == (a.predicted > b.predicted)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def band_of(card: str, family: str, ratios: list[float]) -> ErrorBand:
    """The tenth and ninetieth percentile and the median of measured over planned speed, each a measured ratio."""
    ordered = sorted(ratios)
    tenth = (len(ordered) - 1) // 10
    return ErrorBand(card, family, len(ordered), ordered[tenth], median(ordered), ordered[-1 - tenth])


def bands() -> list[ErrorBand]:
    """One of each card and family of precision, of each card, and of all; the H200's are this trainer's own runs."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for one in judged():
        ratio = one.measured / one.predicted
        for key in ((one.row["gpu"], one.family), (one.row["gpu"], "any"), ("any", "any")):
            ratios.setdefault(key, []).append(ratio)
    runs = json.loads(OWN_RUNS.read_text())["results"]
    ratios["H200", "bf16"] = [run["planned"]["step_ms"] / run["measured"]["step_ms"] for run in runs]
    return [band_of(*key, found) for key, found in sorted(ratios.items())]


def table(every: tuple[Judged, ...]) -> str:
    lines = [
        "| stack | rows | own prediction, median error | held out, median | 90th percentile |",
        "|---|---|---|---|---|",
    ]
    held = dict(zip((each.row["id"] for each in every), errors(every), strict=True))
    for stack in sorted({each.stack for each in every}):
        found = [each for each in every if each.stack == stack]
        own = median(abs(each.error) for each in found)
        out = [abs(held[each.row["id"]]) for each in found]
        name = f"{stack[0]} {'bf16' if stack[1] == 'bf16' else 'fp8 and lower'}"
        lines.append(f"| {name} | {len(found)} | {own:.1%} | {median(out):.1%} | {quantile(out, 0.9):.1%} |")
    return "\n".join(lines)


def card_table(every: tuple[Judged, ...]) -> str:
    """The error of the planner by itself on each card, with its sign."""
    lines = ["| GPU | rows | error, median | size of the error, median | 90th percentile |", "|---|---|---|---|---|"]
    for card in sorted({each.row["gpu"] for each in every}):
        found = [each.error for each in every if each.row["gpu"] == card]
        size = [abs(error) for error in found]
        lines.append(
            f"| {card} | {len(found)} | {median(found):+.1%} | {median(size):.1%} | {quantile(size, 0.9):.1%} |"
        )
    return "\n".join(lines)


def summary(found: tuple[Judged, ...]) -> Iterator[str]:
    out = [abs(each) for each in errors(found)]
    own = [abs(each.error) for each in found]
    ranked = [right(a, b) for a, b in pairs(found)]
    yield f"{len(found)} rows; by itself: median {median(own):.1%}, 90th percentile {quantile(own, 0.9):.1%}"
    yield f"held out: median {median(out):.1%}, 90th percentile {quantile(out, 0.9):.1%}"
    yield f"ranking: {mean(ranked):.1%} of {len(ranked)} pairs"


def print_judgement() -> None:
    found = judged()
    print(table(found), "", card_table(found), "", *summary(found), sep="\n")
    print("\ndense models:", card_table(judged_dense()), sep="\n")
    print("\nleft out:")
    for reason, count in Counter(left_out().values()).most_common():
        print(f"{count} rows: {reason}")
    print("\nworst, held out:")
    for error, one in sorted(zip(errors(found), found, strict=True), key=lambda each: -abs(each[0]))[:14]:
        r = one.row
        print(f"{r['id']} {r['model']} {r['gpu']} {r['precision']}: {error:+.0%} ({r['note'][:60]})")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        JUDGED.write_text("\n".join(band_lines(bands())) + "\n")
    else:
        print_judgement()
