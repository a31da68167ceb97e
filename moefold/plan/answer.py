"""Answers of the planner as plain data, for the command's --json and for the page.

    answer_request({"model": "qwen3-30b-a3b", "gpus": 8, "gpu": "h200", "parallel.ep": 8})["tokens_per_s_per_gpu"]

Without a layout the best layout is searched for. With `search` the answer has the best few layouts as well, and the
Pareto front of memory and speed. All of them are simulated, and their memory includes what lies outside torch's
allocator. A request that cannot be met is refused (`config.errors.UserError`), with a legal choice; where no layout
fits, by `NothingFits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from moefold.anatomy.model_totals import active_parameters, mtp_parameters, total_parameters, train_flops_per_token
from moefold.anatomy.stage_contents import pipeline_layout
from moefold.config.rules import ConfigOnRanks, broken_rules, check_config
from moefold.config.run import Config
from moefold.layout.fold import fold_into_grids
from moefold.plan.advice.advise import answer_beside_figures
from moefold.plan.launch import launch_files, planned_run
from moefold.plan.length_histogram import mean_over_tokens
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.explain_memory import explain_memory
from moefold.plan.memory.peak_memory import GIB, RankMemory, RunSetting, build_run_setting, fullest_rank, memory_by_rank
from moefold.plan.memory.run_setting import microbatches_per_step, product_precision
from moefold.plan.options import PlanChoices
from moefold.plan.remedies import NothingFits, explain_nothing_fits, remedies_for_layout
from moefold.plan.request import PlanRequest, read_request, with_dispatcher
from moefold.plan.search import RankedLayout, SearchResult, describe_layout, search_layouts
from moefold.plan.time.cheapest_context import with_cheapest_context
from moefold.plan.time.dynamic_step import dynamic_context, time_step
from moefold.plan.time.explain_time import explain_time
from moefold.plan.time.simulate_step import StepTime
from moefold.schedule.simulate_program import idle_share, slot_spans

JsonObject = dict[str, Any]

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
    "host": "compute wall: host latency",
    "memory": "memory wall: recompute, offload, optimizer",
    "communication": "communication wall: exposed communication",
    "bubble": "pipeline bubble",
}
SECONDS_PER_DAY = 86_400
DEGREE_NAMES = ("tp", "cp", "pp", "ep", "etp")


def answer_request(request: Mapping[str, Any]) -> JsonObject:
    """The whole answer to a request; with `explain`, the arithmetic of each number."""
    r = read_request(request)
    if not r.search:
        given = check_config(r.config, r.gpus)
        config = with_cheapest_context(given, r.choices, r.gpu, r.gpus)
        answer = plan_layout(r, config, r.choices)
        answer["searched"] = None
        return answer
    # No layout is given: search for the best, then answer for it as if it had been given.
    result = search_layouts(r.config, r.gpus, r.choices, r.gpu, r.fixed, r.best)
    if not result.layouts:
        raise NothingFits(explain_nothing_fits(r, result))
    best = result.layouts[0]
    answer = plan_layout(r, best.config, best.choices)
    answer.update(search_outcome(r, result))
    return answer


def plan_layout(r: PlanRequest, config: Config, choices: PlanChoices) -> JsonObject:
    """Time and memory of one layout."""
    config, dispatcher_reason = with_dispatcher(config, choices, r.gpu, r.gpus)
    setting = build_run_setting(config, r.gpus, choices)
    time = time_step(setting, r.gpu)
    answer: JsonObject = {
        "name": config.name,
        "gpu": r.gpu.name,
        "gpus": r.gpus,
        "parameters": total_parameters(config.model) + mtp_parameters(config.model),
        "active_parameters": active_parameters(config.model),
    }
    # Speed, memory, then where the time goes.
    answer.update(speed_and_budget(r, config, choices, time.seconds))
    answer.update(memory_answer(r, setting))
    answer["time_by_wall"] = time.walls
    answer["time_parts"] = {
        "pipeline": time.pipeline_time.seconds,
        "exchange": time.exchange,
        "optimizer": time.optimizer,
    }
    answer["recompute_cost"] = recompute_cost(r, setting, time.seconds, answer["memory_gib"])
    answer["layout"] = layout_keys(config, choices, r.gpus)
    answer["not_in_trainer"] = missing_in_trainer(r, config, choices)
    answer["dispatcher"] = dispatcher_reason
    answer["attention_imbalance"] = setting.attention_imbalance
    dynamic = dynamic_context(setting, r.gpu)
    answer["dynamic_context"] = str(dynamic) if dynamic else None
    answer["launch"] = None
    answer["remedies"] = []
    if not answer["fits"]:
        answer["remedies"] = remedies_for_layout(r, config, choices)
    elif not answer["not_in_trainer"]:
        answer["launch"] = launch_files(r, config, choices)
    answer["timeline"] = timeline_spans(time)
    rate = answer["tokens_per_s_per_gpu"]
    answer.update(answer_beside_figures(setting, r.gpu, rate))
    if r.explain:
        answer["explained"] = explain_plan(setting, r.gpu)
    return answer


def missing_in_trainer(r: PlanRequest, config: Config, choices: PlanChoices) -> list[str]:
    """What keeps the trainer from running a plan: choices that it lacks, or rules that the run breaks."""
    if choices.not_in_trainer:
        return choices.not_in_trainer
    run = planned_run(r, config, choices)
    return broken_rules(ConfigOnRanks(run, r.gpus))


def memory_answer(r: PlanRequest, setting: RunSetting) -> JsonObject:
    memory = memory_by_rank(setting)
    fullest = fullest_rank(memory)
    need = fullest.needed / GIB
    return {
        "memory_gib": need,
        "memory_limit_gib": r.gpu.memory,
        "fits": need <= r.gpu.memory,
        "largest_rank": {
            "rank": fullest.rank,
            "at": fullest.at,
            "live": list(fullest.live),
        },
        "memory_by_rank": [rank.needed / GIB for rank in memory],
        "memory_parts_by_rank": [memory_parts(rank) for rank in memory],
    }


def recompute_cost(r: PlanRequest, setting: RunSetting, seconds: float, gib: float) -> JsonObject | None:
    """What recompute saves on the largest rank and takes of a step, against the same layout without."""
    if not setting.choices.recompute:
        return None
    memory = replace(setting.config.memory, recompute=())
    config = replace(setting.config, memory=memory)
    choices = replace(setting.choices, recompute=())
    keeping = build_run_setting(config, r.gpus, choices)
    largest = fullest_rank(memory_by_rank(keeping))
    time = time_step(keeping, r.gpu)
    return {"saved_gib": largest.needed / GIB - gib, "added_s": seconds - time.seconds}


def explain_plan(setting: RunSetting, gpu: Gpu) -> list[str]:
    """Lines of arithmetic behind every number: FLOPs, then memory, then time."""
    config = setting.config
    seq_len = config.data.seq_len
    flops = flops_of_token(config, setting.choices)
    attended = f"half of {seq_len} tokens"
    if setting.choices.documents:
        attended = f"half of its document, of lengths {','.join(setting.choices.lengths)}"
    formula = f"3 x (2 x active matmul parameters + attention over {attended})"
    lines = [f"{flops / 1e9:.3f} GFLOP a token to train: {formula}, as `moefold explain` lists by step"]
    lines += explain_memory(config, setting.world, setting.choices)
    lines += explain_time(setting, gpu)
    return lines


def speed_and_budget(r: PlanRequest, config: Config, choices: PlanChoices, seconds: float) -> JsonObject:
    seq_len = config.data.seq_len
    tokens_per_step = config.train.global_batch * seq_len
    flops = flops_of_token(config, choices)
    precision = product_precision(config, choices)
    peak = r.gpu.peak_flops(precision)
    rate = tokens_per_step / seconds / r.gpus
    return {
        "flops_per_token": flops,
        "tokens_per_step": tokens_per_step,
        "step_s": seconds,
        "tflops_per_gpu": rate * flops / 1e12,
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s": rate * r.gpus,
        "mfu": rate * flops / peak,
        "budget": training_budget(r, rate),
    }


def flops_of_token(config: Config, choices: PlanChoices) -> float:
    """FLOPs of a token to train: in its sequence, or in its document where lengths are given."""
    flops = partial(train_flops_per_token, config.model)
    return mean_over_tokens(flops, choices.documents, config.data.seq_len)


def training_budget(r: PlanRequest, rate: float) -> dict[str, float]:
    """Days, GPU hours and dollars for the request's tokens at `rate` tokens per second per GPU."""
    days = r.tokens / (rate * r.gpus) / SECONDS_PER_DAY
    gpu_hours = days * 24 * r.gpus
    return {
        "tokens": r.tokens,
        "days": days,
        "gpu_hours": gpu_hours,
        "dollars": gpu_hours * r.gpu.dollars,
    }


def memory_parts(rank: RankMemory) -> dict[str, float]:
    return {name: getattr(rank, name) / GIB for name in MEMORY_PARTS}


def layout_keys(config: Config, choices: PlanChoices, gpus: int) -> JsonObject:
    """A layout as the keys and values of a request for it."""
    dense_grid, expert_grid = fold_into_grids(gpus, config.parallel)
    keys: JsonObject = {}
    for name in DEGREE_NAMES:
        keys[name] = getattr(config.parallel, name)
    keys["vpp"] = config.pipeline.vpp
    keys["dp"] = dense_grid.sizes["dp"]
    keys["edp"] = expert_grid.sizes["edp"]
    keys["seq"] = config.data.seq_len
    keys["mbs"] = config.train.micro_batch
    keys["gbs"] = config.train.global_batch
    keys["microbatches"] = microbatches_per_step(config, gpus)
    keys["schedule"] = config.pipeline.schedule
    keys["stages"] = str(pipeline_layout(config))
    keys["overlap"] = config.pipeline.pair
    keys["dispatcher"] = config.parallel.dispatcher
    keys["parallel.context"] = config.parallel.context
    keys["precision"] = choices.precision
    keys["precision.recipe"] = config.precision.recipe
    keys["recompute"] = list(choices.recompute)
    keys["offload"] = list(choices.offload)
    keys["graphs"] = choices.graphs
    keys["sharding"] = choices.sharding
    return keys


def timeline_spans(time: StepTime) -> JsonObject:
    """Slots of the pipeline. An op is written F2.5 (forward of microbatch 5 through stage 2), D and W likewise."""
    pipeline = time.pipeline_time
    slots = pipeline.slots
    makespan = slots.makespan
    spans: list[JsonObject] = []
    for span in slot_spans(pipeline.program, slots)[:MAX_TIMELINE_SPANS]:
        entry: JsonObject = {
            "rank": span.rank,
            "start": span.start,
            "end": span.end,
            "ops": [str(op) for op in span.slot],
        }
        spans.append(entry)
    return {
        "microbatches": pipeline.shown_microbatches,
        "makespan": makespan,
        "bubble": [idle_share(busy, makespan) for busy in slots.busy],
        "spans": spans,
    }


def search_outcome(r: PlanRequest, result: SearchResult) -> JsonObject:
    return {
        "layouts": [layout_summary(r, layout) for layout in result.layouts],
        "front": [layout_summary(r, layout) for layout in result.pareto_front],
        "searched": result.layouts_tried,
        "rejected": refusal_entries(result),
    }


def layout_summary(r: PlanRequest, layout: RankedLayout) -> JsonObject:
    summary: JsonObject = {
        "text": describe_layout(layout.config),
        "layout": layout_keys(layout.config, layout.choices, r.gpus),
    }
    seconds = layout.time.seconds
    speed = speed_and_budget(r, layout.config, layout.choices, seconds)
    summary.update(speed)
    summary["memory_gib"] = layout.largest_gib
    summary["not_in_trainer"] = missing_in_trainer(r, layout.config, layout.choices)
    return summary


def refusal_entries(result: SearchResult) -> list[JsonObject]:
    examples = result.refusals.examples
    entries: list[JsonObject] = []
    for reason, count in result.refusals.by_count():
        example = examples[reason]
        entries.append({"reason": reason, "count": count, "example": example})
    return entries
