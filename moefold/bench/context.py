"""`moefold bench context`: a step with static and with dynamic context parallelism, by the planner's prices alone.

Samples of log-normal length are drawn, planned and simulated (`plan/time/context_sizes.py`). Nothing is measured.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

from rich.console import Console

from moefold.bench.options import ContextOptions
from moefold.bench.report import Report, Row, add_number_columns, report_table, show_report
from moefold.config.errors import UserError
from moefold.data.dynamic_context import ContextPlan, ContextShape
from moefold.plan.memory.run_setting import build_run_setting
from moefold.plan.request import PlanRequest, read_request
from moefold.plan.time.context_price import PlannedContextPrice
from moefold.plan.time.context_sizes import LengthDistribution, dynamic_plan, static_plan
from moefold.plan.time.dynamic_step import ranks_by_size
from moefold.plan.time.simulate_step import time_training_step

PETA = 1e15
GIGA = 1e9
FIGURES = ("microbatches", "step_s", "least_s", "pflop", "gb")  # of a batch; their means are told
CAPTION = (
    "PFLOP, GB: of the largest rank, computed in a step and sent for attention. lost: of the time, beyond even work at "
    "the least sizes: waiting for the slowest, launches, sending that attention does not hide."
)


def run_benchmark(options: ContextOptions) -> int:
    report = context_report(options)
    return show_report(report, options.json, print_context_table)


def context_report(options: ContextOptions) -> Report:
    request = read_context_request(options)
    limit = options.limit
    price = PlannedContextPrice(request.config, request.choices, request.gpu, options.gpus, limit)
    stage_ranks = options.gpus // options.pp
    shape = ContextShape(stage_ranks, limit, options.pp)
    check_longest(options, shape)
    update = update_seconds(request, options)
    drawn = LengthDistribution(options.median, options.sigma, options.longest)
    batches: list[dict[str, Row]] = []
    for seed in range(options.batches):
        lengths = drawn.draw(options.tokens, seed)
        batch = measure_batch(lengths, shape, price, options.longest)
        batches.append(batch)
    ways = batches[0]
    results = [mean_row(batches, way, update) for way in ways]
    *static, dynamic = results
    best_static = min(row["step_s"] for row in static)
    return {
        "model": options.model,
        "gpu": options.gpu,
        "gpus": options.gpus,
        "limit": limit,
        "tokens": options.tokens,
        "results": results,
        "ratio": best_static / dynamic["step_s"],
    }


def read_context_request(options: ContextOptions) -> PlanRequest:
    fields = {
        "model": options.model,
        "gpu": options.gpu,
        "gpus": options.gpus,
        "parallel.pp": options.pp,
        "parallel.ep": options.ep,
        "parallel.context": options.context,
        "parallel.tp": 1,
        "parallel.cp": 1,
        "parallel.etp": 1,
    }
    return read_request(fields)


def check_longest(options: ContextOptions, shape: ContextShape) -> None:
    largest = shape.sizes[-1]
    most = shape.limit * largest
    if options.longest > most:
        raise UserError(
            f"--longest {options.longest} is more than {most} tokens, which {largest} ranks hold with "
            f"--limit {shape.limit}; expected at most that: raise --limit"
        )


def update_seconds(request: PlanRequest, options: ContextOptions) -> float:
    """Seconds of a step behind its microbatches, the same in all ways."""
    config = request.config
    data = replace(config.data, seq_len=options.limit)
    train = replace(config.train, micro_batch=1)
    changed = replace(config, data=data, train=train)
    setting = build_run_setting(changed, options.gpus, request.choices)
    timed = time_training_step(setting, request.gpu)
    return timed.exchange + timed.optimizer


def measure_batch(lengths: list[int], shape: ContextShape, price: PlannedContextPrice, longest: int) -> dict[str, Row]:
    plans = {
        "static": static_plan(lengths, shape, price, longest, is_even=False),
        "static, even": static_plan(lengths, shape, price, longest, is_even=True),
        "dynamic": dynamic_plan(lengths, shape, price),
    }
    rows: dict[str, Row] = {}
    for way, plan in plans.items():
        rows[way] = plan_row(plan, lengths, shape, price)
    return rows


def plan_row(plan: ContextPlan, lengths: list[int], shape: ContextShape, price: PlannedContextPrice) -> Row:
    microbatches = plan.microbatches
    stages = shape.stages
    work = price.work_of_ranks(microbatches, lengths, shape.ranks)
    by_size = ranks_by_size(microbatches)
    least = sum(least_seconds(length, shape, price) for length in lengths)
    most_computed = max(each.flops for each in work)
    most_sent = max(each.sent for each in work)
    return {
        "microbatches": len(microbatches),
        "step_s": plan.seconds,
        "least_s": least / (shape.ranks * stages),
        "pflop": most_computed / (PETA * stages),
        "gb": most_sent / (GIGA * stages),
        "sizes": by_size,
    }


def least_seconds(length: int, shape: ContextShape, price: PlannedContextPrice) -> float:
    """Seconds of all ranks of a sample, its least size, were nothing sent."""
    fitting = (size for size in shape.sizes if length <= size * shape.limit)
    least = next(fitting)
    tokens, attention, _ = price.of_sample(length, least)
    return (tokens + attention) * least


def mean_row(batches: list[dict[str, Row]], way: str, update: float) -> Row:
    rows = [batch[way] for batch in batches]
    means = {name: mean(row[name] for row in rows) for name in FIGURES}
    lost = 1 - means["least_s"] / means["step_s"]
    sizes = set[int]()
    for row in rows:
        sizes.update(row["sizes"])
    means["step_s"] += update
    return {"way": way, **means, "lost": lost, "sizes": sorted(sizes)}


def print_context_table(report: Report) -> None:
    cluster = f"{report['model']} on {report['gpus']} x {report['gpu']}, {report['limit']:,} tokens a rank"
    table = report_table(f"{cluster}, {report['tokens']:,} a step, predicted", caption=CAPTION)
    table.add_column("cp", no_wrap=True)
    add_number_columns(table, "microbatches", "step s", "lost", "PFLOP", "GB")
    table.add_column("sizes")
    for row in report["results"]:
        sizes = map(str, row["sizes"])
        table.add_row(
            row["way"],
            f"{row['microbatches']:.1f}",
            f"{row['step_s']:.2f}",
            f"{row['lost']:.0%}",
            f"{row['pflop']:.2f}",
            f"{row['gb']:.0f}",
            " ".join(sizes),
        )
    console = Console()
    console.print(table)
    console.print(f"dynamic is {report['ratio']:.2f} x the better of the static ones", highlight=False)
