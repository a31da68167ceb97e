"""The one question to the planner, and its answer as plain data: the command's --json and the page both ask here.

    answer({"model": "qwen3-30b-a3b", "gpus": 8, "gpu": "h200", "parallel.ep": 8})["tokens_per_s_per_gpu"]

Without a layout the best one is searched for; with `search` the best few come with it, and the front of memory and
speed. What cannot be is refused (`config.refused.Refused`), with a legal choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.anatomy.counts import active_parameters, parameters_ahead, total_parameters, train_flops_per_token
from moefold.anatomy.stages import layout_of
from moefold.config.refused import Refused
from moefold.config.rules import check
from moefold.config.run import Config
from moefold.plan.choices import Choices
from moefold.plan.explain import explain_memory
from moefold.plan.explain_time import explain_time
from moefold.plan.hardware import Gpu
from moefold.plan.memory import GIB, RankMemory, Setting, memory_in, setting_of, worst
from moefold.plan.request import Request, read_request, with_dispatcher
from moefold.plan.search import Candidate, Found, Ranked, Search, described, search
from moefold.plan.simulate import StepTime, time_step

PARTS = ("weights", "gradients", "main", "moments", "activations", "working", "margin", "buffers", "graphs", "outside")
MOST_SPANS = 4000
WALLS = {
    "arithmetic": "arithmetic at the peak",
    "compute": "compute wall: kernels below the peak, pointwise work",
    "host": "compute wall: waiting for launches",
    "memory": "memory wall: recompute, offload, optimizer",
    "communication": "communication wall: travel that shows",
    "bubble": "waiting for other pipeline ranks",
}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Everything there is to say about a request; with `explain`, how each number comes about."""
    r = read_request(request)
    if not r.search:
        config = check(r.config, r.gpus)
        return {**plan(r, config, r.choices), "searched": None}
    found = search(r.config, r.gpus, r.choices, r.gpu, r.fixed, r.best)
    if not found.layouts:
        raise Refused(*nothing_fits(r, found))
    best = found.layouts[0]
    return {**plan(r, best.config, best.choices), **searched(r, found)}


def plan(r: Request, config: Config, choices: Choices) -> dict[str, Any]:
    """One layout."""
    config, why = with_dispatcher(config, choices, r.gpu, r.gpus)
    setting = setting_of(config, r.gpus, choices)
    time, memory = time_step(setting, r.gpu), memory_in(setting)
    fullest = worst(memory)
    need = (fullest.total + fullest.outside) / GIB
    return {
        "name": config.name,
        "gpu": r.gpu.name,
        "gpus": r.gpus,
        "parameters": total_parameters(config.model) + parameters_ahead(config.model),
        "active_parameters": active_parameters(config.model),
        **speed(r, config, choices, time.seconds),
        "memory_gib": fullest.total / GIB,
        "memory_limit_gib": r.gpu.memory,
        "fits": need <= r.gpu.memory,
        "largest_rank": {"rank": fullest.rank, "at": fullest.at, "live": list(fullest.live)},
        "memory_by_rank": [rank.total / GIB for rank in memory],
        "memory_parts_by_rank": [parts(rank) for rank in memory],
        "time_by_wall": time.walls,
        "time_parts": {"pipeline": time.clocked.seconds, "exchange": time.exchange, "optimizer": time.optimizer},
        "layout": layout(config, choices, r.gpus),
        "dispatcher": why,
        "timeline": timeline(time),
        **({"explained": explained(setting, r.gpu)} if r.explain else {}),
    }


def explained(setting: Setting, gpu: Gpu) -> list[str]:
    """FLOPs, then memory, then time, every number as a line of arithmetic."""
    config = setting.config
    flops = train_flops_per_token(config.model, config.data.seq_len)
    return [
        f"{flops / 1e9:.3f} GFLOP a token to train: 3 x (2 x active matmul parameters + attention over half of "
        f"{config.data.seq_len} tokens), as `moefold explain` lists by step",
        *explain_memory(config, setting.world, setting.choices),
        *explain_time(setting, gpu),
    ]


def speed(r: Request, config: Config, choices: Choices, seconds: float) -> dict[str, Any]:
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
        "mfu": rate * flops / r.gpu.peak_of(choices.precision),
        "budget": {
            "tokens": r.tokens,
            "days": days,
            "gpu_hours": days * 24 * r.gpus,
            "dollars": days * 24 * r.gpus * r.gpu.dollars,
        },
    }


def parts(rank: RankMemory) -> dict[str, float]:
    return {name: getattr(rank, name) / GIB for name in PARTS}


def layout(config: Config, choices: Choices, gpus: int) -> dict[str, Any]:
    """A layout as keys and values that make it again."""
    p, c, t = config.parallel, config.pipeline, config.train
    degrees = setting_of(config, gpus, choices).degrees
    return {
        **{name: getattr(p, name) for name in ("tp", "cp", "pp", "ep", "etp")},
        "vpp": c.vpp,
        "dp": degrees["dp"],
        "edp": degrees["edp"],
        "seq": config.data.seq_len,
        "mbs": t.micro_batch,
        "gbs": t.global_batch,
        "microbatches": setting_of(config, gpus, choices).microbatches,
        "schedule": c.schedule,
        "stages": str(layout_of(config)),
        "overlap": c.pair,
        "dispatcher": p.dispatcher,
        "precision": choices.precision,
        "recompute": list(choices.recompute),
        "offload": list(choices.offload),
        "graphs": choices.graphs,
        "sharding": choices.sharding,
    }


def timeline(time: StepTime) -> dict[str, Any]:
    """The pipeline's slots: ops written as F2.5 (forward of microbatch 5 through stage 2), D and W likewise."""
    spans = [
        {"rank": span.rank, "start": span.start, "end": span.end, "ops": [str(op) for op in span.slot]}
        for span in time.clocked.timeline.spans[:MOST_SPANS]
    ]
    return {
        "microbatches": time.clocked.shown,
        "makespan": time.clocked.timeline.makespan,
        "bubble": time.clocked.timeline.bubble,
        "spans": spans,
    }


def searched(r: Request, found: Found) -> dict[str, Any]:
    return {
        "layouts": [summary(r, each) for each in found.layouts],
        "front": [
            {"memory_gib": gib, "tokens_per_s_per_gpu": rate, "layout": brief(each), "text": described(each.config)}
            for gib, rate, each in found.front
        ],
        "searched": found.looked,
        "rejected": [
            {"reason": reason, "count": count, "example": found.refusals.examples[reason]}
            for reason, count in sorted(found.refusals.counts.items(), key=lambda each: -each[1])
        ],
    }


def summary(r: Request, each: Ranked) -> dict[str, Any]:
    return {
        "text": described(each.config),
        "layout": layout(each.config, each.choices, r.gpus),
        **speed(r, each.config, each.choices, each.time.seconds),
        "memory_gib": each.gib,
    }


def brief(each: Candidate) -> dict[str, Any]:
    return layout(each.config, each.choices, each.setting.world)


def nothing_fits(r: Request, found: Found) -> list[str]:
    """Why no layout is left, and what would be nearest to one."""
    reasons = sorted(found.refusals.counts.items(), key=lambda each: -each[1])[:4]
    said = "; ".join(f"{count} x {reason} ({found.refusals.examples[reason]})" for reason, count in reasons)
    problem = f"no layout of {r.config.name} fits {r.gpus} x {r.gpu.name}, of {found.looked} looked at: {said}"
    for more in (r.gpus * times for times in (2, 4, 8, 16, 32, 64, 128, 256, 512)):
        batch = r.config.train.global_batch * more // r.gpus
        grown = replace(r.config, train=replace(r.config.train, global_batch=batch))
        if any(Search(more, r.gpu, r.choices, r.fixed).candidates(grown)):
            return [f"{problem}; take {more} GPUs, a card with more memory, a lower precision or a shorter sequence"]
    return [f"{problem}; leave more of the layout open, or take more GPUs"]
