"""Rows of `tests/plan/data/published_points.csv` as configurations, or the reason why a row has none.

A row states model, GPU, layout and batch. `completed` adds what its source says outside the table. Where a row is
silent on dispatcher, overlap, graphs or recompute, `practice` has what the public recipes of that trainer do on that
GPU (Megatron-Bridge, scripts/performance/configs).
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

from moefold.anatomy.model_totals import train_flops_per_token
from moefold.config.run import (
    AttentionConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from moefold.plan.machine.gpu import find_gpu_by_name, known_gpu_names
from moefold.plan.options import PlanChoices
from moefold.presets.zoo import PRESETS

POINTS = Path(__file__).parents[1] / "plan" / "data" / "published_points.csv"
PRESET = {
    "DeepSeek-V3": "deepseek-v3",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "GPT-OSS-120B": "gpt-oss-120b",
    "GPT-OSS-20B": "gpt-oss-20b",
    "Mixtral-8x22B": "mixtral-8x22b",
    "Mixtral-8x22B-G8T8": "mixtral-8x22b-g8t8",
    "Llama3-8x70B": "llama3-8x70b",
    "Qwen2-57B-A14B": "qwen2-57b-a14b",
    "Internal-352B": "internal-352b",
}
DENSE = {  # layers, hidden, heads, inner width; 8 key heads of 128 dims and 128,256 words
    "Llama3-8B": (32, 4096, 32, 14_336),
    "Llama3-70B": (80, 8192, 64, 28_672),
    "Llama3.1-405B": (126, 16_384, 128, 53_248),
}
OTHER_LAYERS = {
    "Nemotron-3": "Mamba layers",
    "DeepSeek-V4": "sparse attention and hyper-connections",
    "Qwen3-Next": "gated delta-rule layers",
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
DISPATCHER = {
    "": "auto",
    "alltoall": "all_to_all",
    "HybridEP": "deepep",
    "DeepEP": "deepep",
    "DeepEP-like": "deepep",
}
CHUNKS = {"Mixtral-8x22B": 7, "Mixtral-8x22B-G8T8": 7, "Qwen2-57B-A14B": 7, "Llama3-8x70B": 5}
LAYOUT = ("n_gpus", "seq_len", "mbs", "gbs", "tp", "pp", "vpp", "cp", "ep", "etp")
KNOBS = ("dispatcher", "recompute", "overlap", "cuda_graphs")
MEGASCALE = {"tp": "1", "cp": "8", "ep": "8", "etp": "1"}  # SP by all-to-all, and experts inside a node
TENSOR_PARALLEL = {"tp": "8", "cp": "1", "ep": "1", "etp": "8"}
MEGASCALE_TOKENS = 1137.1  # of Table 3 on 240 GPUs; Table 5 is relative to this run's 1.28

Row = dict[str, str]


@cache
def rows() -> tuple[Row, ...]:
    with POINTS.open(encoding="utf-8") as lines:
        return tuple(completed(row) for row in csv.DictReader(lines))


def completed(row: Row) -> Row:
    """The row with what its source says elsewhere: methods of Parallel Folding without a pipeline, MegaScale-MoE's
    parallelism by name, the batch of DeepSeek-V3's report."""
    name = row["id"]
    if name.startswith("fold-t") and not row["pp"] and row["note"].startswith(("FSDP", "TP+EP+DP")):
        return row | {"pp": "1", "ep": row["ep"] or "1"}
    if name.startswith("mega-t5"):
        relative = float(row["note"].split()[2])
        layout = TENSOR_PARALLEL if name == "mega-t5-0" else MEGASCALE
        overlap = "inter-op" if relative > 1.13 else ""
        tokens = str(MEGASCALE_TOKENS * relative / 1.28)
        return row | layout | {"overlap": overlap, "tokens_per_s_per_gpu": tokens}
    if name.startswith("mega"):
        return row | (MEGASCALE if "SP8" in row["note"] else TENSOR_PARALLEL)
    if name == "dsv3-report":
        return row | {"gbs": "15360", "vpp": "2"}
    return row


def dense_model(name: str) -> ModelConfig:
    layers, hidden, heads, inner = DENSE[name]
    attention = AttentionConfig(heads=heads, kv_heads=8, head_dim=128)
    moe = MoeConfig(experts=1, top_k=1, ffn=inner, dense_layers=layers)
    return ModelConfig(
        layers=layers, hidden=hidden, vocab=128_256, dense_ffn=inner, norm_eps=1e-5, attention=attention, moe=moe
    )


def model_of(row: Row) -> ModelConfig | None:
    name = row["model"]
    if name in DENSE:
        return dense_model(name)
    if name.removesuffix("-noMTP") not in PRESET:
        return None
    model = PRESETS[PRESET[name.removesuffix("-noMTP")]]().model
    return replace(model, mtp=0) if name.endswith("-noMTP") or "no MTP" in row["note"] else model


def why_not(row: Row) -> str:
    """The reason why a row cannot be judged; empty where it can."""
    if row["id"] == "mega-t5-3":
        return "the run of another row, mega-377"
    for prefix, layers in OTHER_LAYERS.items():
        if row["model"].startswith(prefix):
            return f"{layers}, which neither the planner nor the trainer has"
    if not row["tflops_per_gpu"] and not row["tokens_per_s_per_gpu"]:
        return "no throughput is published"
    if row["gpu"].lower() not in known_gpu_names():
        return f"no GPU file for {row['gpu']}"
    silent = [key for key in ("n_gpus", "pp", "ep") if not row[key]]
    if silent:
        return f"the source does not state {', '.join(silent)}"
    return ""


Practice = tuple[str, bool, str, tuple[str, ...]]


def practice(row: Row) -> Practice:
    """Dispatcher, overlap, graphs and recompute: as stated, else as the recipes of Megatron-Bridge have them."""
    overlap = row["overlap"] not in ("", "off")
    captured = row["cuda_graphs"]
    graphs = "none" if captured in ("", "off") else "whole" if "full" in captured else "static"
    again = tuple(name for name in row["recompute"].split(",") if name not in ("", "none"))
    stated = DISPATCHER[row["dispatcher"]], overlap, graphs, again
    if not row["id"].startswith(("mb-2", "pr1869")):
        return stated
    if row["gpu"] in ("B200", "B300"):
        return practice_on_eight(row)
    return practice_on_racks(row) if row["gpu"].startswith("GB") else practice_on_hopper(row)


def practice_on_eight(row: Row) -> Practice:
    """Blackwell in nodes of eight: B200 and B300."""
    model, card = row["model"], row["gpu"]
    if model.startswith("DeepSeek"):
        woven = row["ep"] == "32"
        return "deepep", woven, "static" if woven else "none", ("up", "mlp") if woven else ("up",)
    if model.startswith("GPT-OSS"):
        if card == "B200":
            return "all_to_all", False, "none", ("norm", "activation")
        latest = row["precision"] != "BF16"
        return "all_to_all" if row["ep"] == "64" else "deepep", latest, "static", ()
    return ("all_to_all", False, "none", ()) if "235B" in model else ("deepep", False, "static", ())


def practice_on_racks(row: Row) -> Practice:
    """Blackwell in domains of 72: GB200 and GB300."""
    release, is_gb200 = row["id"].split("-")[1], row["gpu"] == "GB200"
    latest = release >= "26.06" and row["precision"] != "BF16"
    again: tuple[str, ...] = ()
    if row["model"].startswith("DeepSeek") and is_gb200:
        again = ("up",) if latest else ("mlp",)
    if latest:
        return "deepep", True, "whole", again
    if row["model"].startswith("GPT-OSS"):
        return "all_to_all", is_gb200, "none" if is_gb200 else "static", again
    return "deepep", row["overlap"] not in ("", "off"), "static", again


def practice_on_hopper(row: Row) -> Practice:
    model = row["model"]
    captured = row["cuda_graphs"]
    graphs = "none" if captured in ("", "off") else "static"
    again = {"GPT": ("norm", "activation"), "Dee": ("up", "mlp")}.get(model[:3], ())
    if "235B" in model:
        return "all_to_all", True, graphs, again
    return "all_to_all" if model.startswith("GPT-OSS") else "deepep", False, graphs, again


def planned(row: Row, model: ModelConfig) -> tuple[Config, PlanChoices]:
    """The row as a configuration. 002's runs without folding cut experts as they cut attention, and 002 does not say
    vpp: layers go in chunks of one (`CHUNKS`)."""
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
            context="all_to_all" if row["id"].startswith("mega") else "ring",
            dispatcher=dispatcher,  # pyright: ignore[reportArgumentType]
        ),
        pipeline=PipelineConfig(
            schedule="dualpipe_v" if row["overlap"] == "DualPipe" else "1f1b",
            vpp=n["vpp"] if n["pp"] > 1 else 1,
            pair=overlap and n["ep"] > 1,
        ),
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


def measured_tokens(row: Row, config: Config) -> float:
    """Tokens a second and GPU, as printed or by the FLOPs of a token."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    flops = train_flops_per_token(config.model, config.data.seq_len)
    return float(row["tflops_per_gpu"]) * 1e12 / flops
