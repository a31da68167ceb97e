"""The one question to the planner, and its answer as plain data: the command's --json and the page both ask here.

    answer({"model": "qwen3-30b-a3b", "gpus": 8, "gpu": "h200", "parallel.ep": 8})["tokens_per_s_per_gpu"]

Without a layout the best one is searched for; with `search` the best few come with it, and the front of memory and
speed. What cannot be is refused (`config.refused.Refused`), with a legal choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.anatomy.model_totals import active_parameters, mtp_parameters, total_parameters, train_flops_per_token
from moefold.anatomy.stage_contents import pipeline_layout
from moefold.config.errors import UserError
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.explain_memory import explain_memory
from moefold.plan.memory.peak_memory import GIB, RankMemory, RunSetting, build_run_setting, fullest_rank, memory_by_rank
from moefold.plan.options import PlanChoices
from moefold.plan.request import PlanRequest, read_request, with_dispatcher
from moefold.plan.search import Candidate, LayoutSearch, RankedLayout, SearchResult, describe_layout, search_layouts
from moefold.plan.time.explain_time import explain_time
from moefold.plan.time.simulate_step import StepTime, time_training_step

MEMORY_PARTS = (
    "weights",
    "gradients",
    "main",
    "moments",
    "activations",
    "working",
    "margin",
    "buffers",
    "graphs",
    "outside",
)
MAX_TIMELINE_SPANS = 4000
TIME_WALLS = {
    "arithmetic": "arithmetic at the peak",
    "compute": "compute wall: kernels below the peak, pointwise work",
    "host": "compute wall: waiting for launches",
    "memory": "memory wall: recompute, offload, optimizer",
    "communication": "communication wall: travel that shows",
    "bubble": "waiting for other pipeline ranks",
}


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Everything there is to say about a request; with `explain`, how each number comes about."""
    r = read_request(request)
    if not r.search:
        config = check_config(r.config, r.gpus)
        return {**plan_layout(r, config, r.choices), "searched": None}
    found = search_layouts(r.config, r.gpus, r.choices, r.gpu, r.fixed, r.best)
    if not found.layouts:
        raise UserError(*explain_nothing_fits(r, found))
    best = found.layouts[0]
    return {**plan_layout(r, best.config, best.choices), **search_outcome(r, found)}


def plan_layout(r: PlanRequest, config: Config, choices: PlanChoices) -> dict[str, Any]:
    """One layout."""
    config, why = with_dispatcher(config, choices, r.gpu, r.gpus)
    setting = build_run_setting(config, r.gpus, choices)
    time, memory = time_training_step(setting, r.gpu), memory_by_rank(setting)
    fullest = fullest_rank(memory)
    need = (fullest.total + fullest.outside) / GIB
    return {
        "name": config.name,
        "gpu": r.gpu.name,
        "gpus": r.gpus,
        "parameters": total_parameters(config.model) + mtp_parameters(config.model),
        "active_parameters": active_parameters(config.model),
        **speed_and_budget(r, config, choices, time.seconds),
        "memory_gib": fullest.total / GIB,
        "memory_limit_gib": r.gpu.memory,
        "fits": need <= r.gpu.memory,
        "largest_rank": {"rank": fullest.rank, "at": fullest.at, "live": list(fullest.live)},
        "memory_by_rank": [rank.total / GIB for rank in memory],
        "memory_parts_by_rank": [memory_parts(rank) for rank in memory],
        "time_by_wall": time.walls,
        "time_parts": {"pipeline": time.pipeline_time.seconds, "exchange": time.exchange, "optimizer": time.optimizer},
        "layout": layout_keys(config, choices, r.gpus),
        "dispatcher": why,
        "timeline": timeline_spans(time),
        **({"explained": explain_plan(setting, r.gpu)} if r.explain else {}),
    }


def explain_plan(setting: RunSetting, gpu: Gpu) -> list[str]:
    """FLOPs, then memory, then time, every number as a line of arithmetic."""
    config = setting.config
    flops = train_flops_per_token(config.model, config.data.seq_len)
    return [
        f"{flops / 1e9:.3f} GFLOP a token to train: 3 x (2 x active matmul parameters + attention over half of "
        f"{config.data.seq_len} tokens), as `moefold explain` lists by step",
        *explain_memory(config, setting.world, setting.choices),
        *explain_time(setting, gpu),
    ]


def speed_and_budget(r: PlanRequest, config: Config, choices: PlanChoices, seconds: float) -> dict[str, Any]:
    batch = config.train.global_batch * config.data.seq_len
    flops = train_flops_per_token(config.model, config.data.seq_len)
    rate = batch / seconds / r.gpus
    days = r.tokens / (rate * r.gpus) / 86_400
    return {
        "flops_per_token": flops,
        "tokens_per_step": batch,
        "step_s": seconds,
        "tflops_per_gpu": rate * flops / 1e12,
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s": rate * r.gpus,
        "mfu": rate * flops / r.gpu.peak_flops(choices.precision),
        "budget": {
            "tokens": r.tokens,
            "days": days,
            "gpu_hours": days * 24 * r.gpus,
            "dollars": days * 24 * r.gpus * r.gpu.dollars,
        },
    }


def memory_parts(rank: RankMemory) -> dict[str, float]:
    return {name: getattr(rank, name) / GIB for name in MEMORY_PARTS}


def layout_keys(config: Config, choices: PlanChoices, gpus: int) -> dict[str, Any]:
    """A layout as keys and values that make it again."""
    p, c, t = config.parallel, config.pipeline, config.train
    degrees = build_run_setting(config, gpus, choices).degrees
    return {
        **{name: getattr(p, name) for name in ("tp", "cp", "pp", "ep", "etp")},
        "vpp": c.vpp,
        "dp": degrees["dp"],
        "edp": degrees["edp"],
        "seq": config.data.seq_len,
        "mbs": t.micro_batch,
        "gbs": t.global_batch,
        "microbatches": build_run_setting(config, gpus, choices).microbatches,
        "schedule": c.schedule,
        "stages": str(pipeline_layout(config)),
        "overlap": c.pair,
        "dispatcher": p.dispatcher,
        "precision": choices.precision,
        "recompute": list(choices.recompute),
        "offload": list(choices.offload),
        "graphs": choices.graphs,
        "sharding": choices.sharding,
    }


def timeline_spans(time: StepTime) -> dict[str, Any]:
    """The pipeline's slots: ops written as F2.5 (forward of microbatch 5 through stage 2), D and W likewise."""
    spans = [
        {"rank": span.rank, "start": span.start, "end": span.end, "ops": [str(op) for op in span.slot]}
        for span in time.pipeline_time.timeline.spans[:MAX_TIMELINE_SPANS]
    ]
    return {
        "microbatches": time.pipeline_time.shown_microbatches,
        "makespan": time.pipeline_time.timeline.makespan,
        "bubble": time.pipeline_time.timeline.bubble,
        "spans": spans,
    }


def search_outcome(r: PlanRequest, found: SearchResult) -> dict[str, Any]:
    return {
        "layouts": [layout_summary(r, each) for each in found.layouts],
        "front": [
            {
                "memory_gib": gib,
                "tokens_per_s_per_gpu": rate,
                "layout": candidate_layout(each),
                "text": describe_layout(each.config),
            }
            for gib, rate, each in found.pareto_front
        ],
        "searched": found.layouts_tried,
        "rejected": [
            {"reason": reason, "count": count, "example": found.refusals.examples[reason]}
            for reason, count in sorted(found.refusals.counts.items(), key=lambda each: -each[1])
        ],
    }


def layout_summary(r: PlanRequest, each: RankedLayout) -> dict[str, Any]:
    return {
        "text": describe_layout(each.config),
        "layout": layout_keys(each.config, each.choices, r.gpus),
        **speed_and_budget(r, each.config, each.choices, each.time.seconds),
        "memory_gib": each.largest_gib,
    }


def candidate_layout(each: Candidate) -> dict[str, Any]:
    return layout_keys(each.config, each.choices, each.setting.world)


def explain_nothing_fits(r: PlanRequest, found: SearchResult) -> list[str]:
    """Why no layout is left, and what would be nearest to one."""
    reasons = sorted(found.refusals.counts.items(), key=lambda each: -each[1])[:4]
    said = "; ".join(f"{count} x {reason} ({found.refusals.examples[reason]})" for reason, count in reasons)
    problem = f"no layout of {r.config.name} fits {r.gpus} x {r.gpu.name}, of {found.layouts_tried} looked at: {said}"
    for more in (r.gpus * times for times in (2, 4, 8, 16, 32, 64, 128, 256, 512)):
        batch = r.config.train.global_batch * more // r.gpus
        grown = replace(r.config, train=replace(r.config.train, global_batch=batch))
        if any(LayoutSearch(more, r.gpu, r.choices, r.fixed).feasible_candidates(grown)):
            return [f"{problem}; take {more} GPUs, a card with more memory, a lower precision or a shorter sequence"]
    return [f"{problem}; leave more of the layout open, or take more GPUs"]
