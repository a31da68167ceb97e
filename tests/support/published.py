"""Published throughput, as the planner would have foretold it: rows of `tests/plan/data/published_points.csv`.

    python -m tests.support.published        prints the table of docs/planner.md

A row states model, GPU, layout and batch. Where it is silent on dispatcher, overlap, graphs or recompute, `practice`
has what the public recipes of that trainer do on that GPU (Megatron-Bridge, scripts/performance/configs). A software
stack is one release of one source in one family of precision; it gets one factor, the mean log of measured over
predicted of its other configurations: never of the row that is judged, nor of another run of the same configuration.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean, median

from moefold.anatomy.model_totals import train_flops_per_token
from moefold.config.run import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import time_training_step
from moefold.presets.zoo import PRESETS

POINTS = Path(__file__).parents[1] / "plan" / "data" / "published_points.csv"
GPUS = ("H100", "GB200", "GB300")
PRESET = {
    "DeepSeek-V3": "deepseek-v3",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "GPT-OSS-120B": "gpt-oss-120b",
    "GPT-OSS-20B": "gpt-oss-20b",
    "Mixtral-8x22B": "mixtral-8x22b",
    "Qwen2-57B-A14B": "qwen2-57b-a14b",
}
PRECISION = {
    "BF16": "bf16",
    "FP8": "fp8",
    "FP8-CS": "fp8",
    "FP8-BLK": "fp8-blockwise",
    "FP8-MX": "mxfp8",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
}
DISPATCHER = {"": "auto", "alltoall": "all_to_all", "HybridEP": "deepep", "DeepEP": "deepep"}
CHUNKS = {"Mixtral-8x22B": 7, "Qwen2-57B-A14B": 7, "Llama3-8x70B": 5}  # 002 does not say vpp: layers in chunks of one
LAYOUT = ("n_gpus", "seq_len", "mbs", "gbs", "tp", "pp", "vpp", "cp", "ep", "etp")
KNOBS = ("dispatcher", "recompute", "overlap", "cuda_graphs")

Row = dict[str, str]


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
    def stack(self) -> tuple[str, str]:
        return self.release, "bf16" if self.row["precision"] == "BF16" else "low"


def model_of(row: Row) -> ModelConfig | None:
    name = row["model"]
    if name == "Llama3-8x70B":
        base = PRESETS["mixtral-8x22b"]().model
        attention = replace(base.attention, heads=64, kv_heads=8, head_dim=128)
        moe = replace(base.moe, ffn=28_672)
        return replace(base, layers=80, hidden=8192, vocab=128_256, attention=attention, moe=moe)
    if name.removesuffix("-noMTP") not in PRESET:
        return None
    model = PRESETS[PRESET[name.removesuffix("-noMTP")]]().model
    return replace(model, mtp=0) if name.endswith("-noMTP") or "no MTP" in row["note"] else model


def practice(row: Row) -> tuple[str, bool, str, tuple[str, ...]]:
    """Dispatcher, overlap, graphs and recompute: as stated, else as the recipes of Megatron-Bridge have them."""
    model, fast, release = row["model"], row["gpu"].startswith("GB"), row["id"].split("-")[1]
    dispatcher, overlap = row["dispatcher"], row["overlap"] not in ("", "off")
    captured = row["cuda_graphs"]
    graphs = "none" if captured in ("", "off") else "whole" if "full" in captured else "static"
    again = tuple(name for name in row["recompute"].split(",") if name not in ("", "none"))
    if not row["id"].startswith("mb-2"):
        return DISPATCHER[dispatcher], overlap, graphs, again
    latest = release >= "26.06" and row["precision"] != "BF16"
    if fast and latest:
        dispatcher, overlap, graphs = "HybridEP", True, "whole"
    elif fast and model.startswith("GPT-OSS"):
        dispatcher, overlap, graphs = "alltoall", row["gpu"] == "GB200", "none" if row["gpu"] == "GB200" else "static"
    elif fast:
        dispatcher, graphs = "HybridEP", "static"
    else:
        dispatcher, overlap = ("alltoall", True) if "235B" in model else ("HybridEP", False)
        dispatcher = "alltoall" if model.startswith("GPT-OSS") else dispatcher
        again = {"GPT": ("norm", "activation"), "Dee": ("up", "mlp")}.get(model[:3], ())
    if model.startswith("DeepSeek") and row["gpu"] == "GB200":
        again = ("up",) if latest else ("mlp",)
    return DISPATCHER[dispatcher], overlap, graphs, again


def planned(row: Row, model: ModelConfig) -> tuple[Config, PlanChoices]:
    """The row as a configuration. 002's runs without folding cut experts as they cut attention."""
    n = {key: int(row[key] or 1) for key in LAYOUT}
    full = "FSDP" in row["note"]
    if row["id"].startswith("fold"):
        n["etp"] = n["tp"] if not row["etp"] and "Folding" not in row["note"] and not full else 1
        n["vpp"] = CHUNKS[row["model"]] if n["pp"] > 1 else 1
    dispatcher, overlap, graphs, again = practice(row)
    config = Config(
        model=model,
        data=DataConfig(seq_len=n["seq_len"] if row["seq_len"] else 4096),
        train=TrainConfig(global_batch=n["gbs"] if row["gbs"] else 2048, micro_batch=n["mbs"]),
        optim=OptimConfig(gradient_reduce="bf16" if full else "fp32"),
        parallel=ParallelConfig(
            tp=n["tp"],
            cp=n["cp"],
            pp=n["pp"],
            ep=n["ep"],
            etp=n["etp"],
            dispatcher=dispatcher,  # pyright: ignore[reportArgumentType]
        ),
        pipeline=PipelineConfig(vpp=n["vpp"] if n["pp"] > 1 else 1, pair=overlap),
    )
    choices = PlanChoices(
        stack="megatron",
        precision=PRECISION[row["precision"]],  # pyright: ignore[reportArgumentType]
        recompute=again,
        graphs=graphs,  # pyright: ignore[reportArgumentType]
        sharding="fsdp" if full else "zero",
        node=find_gpu_by_name(row["gpu"]).domain,
        spread=0.0,
    )
    return config, choices


@cache
def tokens_per_second(config: Config, choices: PlanChoices, gpu: str, gpus: int) -> float:
    seconds = time_training_step(build_run_setting(config, gpus, choices), find_gpu_by_name(gpu)).seconds
    return config.train.global_batch * config.data.seq_len / gpus / seconds


def judge(row: Row) -> Judged | None:
    """The row, if it is about a MoE this planner can describe, on one of the GPUs asked for, with its layout stated."""
    model = model_of(row)
    stated = all(row[key] for key in ("n_gpus", "pp", "ep"))
    speed = row["tokens_per_s_per_gpu"] or row["tflops_per_gpu"]
    if model is None or row["gpu"] not in GPUS or not stated or not speed:
        return None
    config, choices = planned(row, model)
    flops = train_flops_per_token(model, config.data.seq_len)
    measured = float(row["tokens_per_s_per_gpu"] or float(row["tflops_per_gpu"]) * 1e12 / flops)
    return Judged(row, measured, tokens_per_second(config, choices, row["gpu"], int(row["n_gpus"])))


@cache
def judged() -> tuple[Judged, ...]:
    with POINTS.open(encoding="utf-8") as lines:
        return tuple(found for row in csv.DictReader(lines) if (found := judge(row)))


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


def table(every: tuple[Judged, ...]) -> str:
    lines = [
        "| stack | rows | own prediction, median error | held out, median | 90th percentile |",
        "|---|---|---|---|---|",
    ]
    held = dict(zip((each.row["id"] for each in every), errors(every), strict=True))
    for stack in sorted({each.stack for each in every}):
        rows = [each for each in every if each.stack == stack]
        own = median(abs(each.predicted / each.measured - 1) for each in rows)
        out = [abs(held[each.row["id"]]) for each in rows]
        name = f"{stack[0]} {'bf16' if stack[1] == 'bf16' else 'fp8 and lower'}"
        lines.append(f"| {name} | {len(rows)} | {own:.1%} | {median(out):.1%} | {quantile(out, 0.9):.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = judged()
    out = [abs(each) for each in errors(found)]
    own = [abs(each.predicted / each.measured - 1) for each in found]
    ranked = [right(a, b) for a, b in pairs(found)]
    print(table(found))
    print(f"\n{len(found)} rows; by itself: median {median(own):.1%}, 90th percentile {quantile(own, 0.9):.1%}")
    print(f"held out: median {median(out):.1%}, 90th percentile {quantile(out, 0.9):.1%}")
    print(f"ranking: {mean(ranked):.1%} of {len(ranked)} pairs")
    print("\nworst, held out:")
    for error, one in sorted(zip(errors(found), found, strict=True), key=lambda each: -abs(each[0]))[:14]:
        r = one.row
        print(f"{r['id']} {r['model']} {r['gpu']} {r['precision']}: {error:+.0%} ({r['note'][:60]})")
