"""`moefold bench echo`: how even the rows of ranks become where hot experts are cloned, by the plan alone.

Loads are drawn: experts are liked by Zipf's law in a random order, and each choice of each token is one draw. In every
step each expert's liking changes by a random factor. A plan is made for the loads of the same step (`now`), or for
those of the step before (`previous`), and judged on the rows of the largest rank over the mean of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from moefold.bench.options import EchoOptions
from moefold.bench.report import Report, Row, add_number_columns, report_table, show_report
from moefold.dispatch.echo_plan import ClonePlan, plan_clones, rows_of_ranks
from moefold.dispatch.expert_placement import ExpertPlacement, contiguous_placement

MIB = 1024**2
BYTES_EACH = 2  # bf16
MATRICES = 3  # of an expert: gate, up, down


class EchoCase(NamedTuple):
    ranks: int
    zipf: float


def run_benchmark(options: EchoOptions) -> int:
    results: list[Row] = []
    for ranks in options.ranks:
        for zipf in options.zipf:
            row = measure_case(options, EchoCase(ranks, zipf))
            results.append(row)
    report: Report = {"experts": options.experts, "slots": options.slots, "drift": options.drift, "results": results}
    return show_report(report, options.json, print_echo_table)


def measure_case(options: EchoOptions, case: EchoCase) -> Row:
    """Figures over all draws. Ratios are the worst ones, but for `without`, which is the mean one."""
    experts = contiguous_placement(options.experts, case.ranks)
    without: list[float] = []
    now: list[float] = []
    previous: list[float] = []
    clones: list[int] = []
    for seed in range(options.draws):
        steps = draw_loads(options, case, seed)
        plan = plan_clones(steps[0], experts, options.slots)
        for loads_E in steps[1:]:
            late_plan = plan.scaled_to(loads_E)
            plan = plan_clones(loads_E, experts, options.slots)
            rows_n = rows_of_ranks(loads_E, experts)
            without.append(over_mean(rows_n))
            now.append(planned_over_mean(plan, experts))
            previous.append(planned_over_mean(late_plan, experts))
            clones.append(int((plan.clone_nS >= 0).sum()))
    clones_of_rank = sum(clones) / len(clones) / case.ranks
    expert_bytes = MATRICES * options.hidden * options.ffn * BYTES_EACH
    return {
        "ranks": case.ranks,
        "zipf": case.zipf,
        "without": sum(without) / len(without),
        "now": max(now),
        "previous": max(previous),
        "clones_of_rank": clones_of_rank,
        "mib_of_rank": clones_of_rank * expert_bytes / MIB,
    }


def draw_loads(options: EchoOptions, case: EchoCase, seed: int) -> list[Tensor]:
    """Rows of each expert in each step."""
    random = torch.Generator().manual_seed(seed)
    place_E = torch.randperm(options.experts, generator=random) + 1
    log_liking_E = -case.zipf * place_E.double().log()
    choices = options.tokens * options.top_k * case.ranks
    steps: list[Tensor] = []
    for _ in range(options.steps + 1):
        mean_E = choices * log_liking_E.softmax(0)
        loads_E = torch.poisson(mean_E, generator=random)
        steps.append(loads_E.long())
        change_E = torch.randn(options.experts, generator=random, dtype=torch.float64)
        log_liking_E = log_liking_E + options.drift * change_E
    return steps


def planned_over_mean(plan: ClonePlan, experts: ExpertPlacement) -> float:
    rows_n = plan.rank_rows(experts)
    return over_mean(rows_n)


def over_mean(rows_n: Tensor) -> float:
    """Rows of the largest rank over the mean."""
    mean = rows_n.double().mean()
    return float(rows_n.max() / mean)


def print_echo_table(report: Report) -> None:
    title = f"{report['experts']} experts, {report['slots']} spare slots a rank: the largest rank's rows over the mean"
    table = report_table(title)
    add_number_columns(table, "ranks", "Zipf", "no clones", "now", "previous", "clones a rank", "MiB a rank")
    for row in report["results"]:
        ratios = [f"{row[name]:.2f}" for name in ("without", "now", "previous")]
        clones = f"{row['clones_of_rank']:.2f}"
        mib = f"{row['mib_of_rank']:.1f}"
        table.add_row(str(row["ranks"]), f"{row['zipf']:g}", *ratios, clones, mib)
    Console().print(table)
