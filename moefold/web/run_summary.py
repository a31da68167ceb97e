"""What a report tells of a run, read from the run's folder and thinned to what a page can show.

config.yaml     what the run is           -> facts
metrics.jsonl   a line each step          -> curves, and maps of layers x steps
router.jsonl    a line every so many      -> the load of layers x experts x steps, one byte each
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moefold.anatomy.model_totals import active_parameters, total_parameters
from moefold.anatomy.step_specs import is_moe_layer
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.run import Config
from moefold.observe.metrics import iterate_records
from moefold.observe.progress import compact_number
from moefold.presets.recipe import recipe_base
from moefold.web.downsample import DownsampledSeries

CURVE_METRICS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "tflops")
LAYER_METRICS = ("max_violation", "load_entropy", "dead_experts", "drop_rate", "moved_bytes")
WORST_STEP_METRICS = ("max_violation", "dead_experts")  # where a column tells its worst step; of the others, the mean

MAX_CURVE_POINTS = 800  # of a curve
MAX_MAP_COLUMNS = 400  # of all runs' maps together
MAX_LOAD_CELLS = 2_000_000  # of all runs' loads together: a byte each, four thirds of that in the page

CODE_NONE, CODE_UNKNOWN = 0, 255  # codes of an expert that got nothing, and of one not measured


def require_run_folder(folder: Path) -> None:
    """Refuse a folder that holds no run, and say what to give instead."""
    if not folder.exists():
        near = did_you_mean(str(folder), (str(run) for run in run_folders_in(folder.parent)))
        raise UserError(
            f"no folder {folder}{near}; expected the folder of a run, as `moefold train` names when it ends"
        )
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; expected the folder of a run, such as {folder.parent}")
    lacks = [name for name in ("config.yaml", "metrics.jsonl") if not (folder / name).is_file()]
    if lacks:
        inside = [str(run) for run in run_folders_in(folder)]
        hint = f"there are runs inside: {', '.join(inside[:5])}" if inside else "give a folder `moefold train` wrote"
        raise UserError(f"{folder} is no run: it has no {' and no '.join(lacks)}; {hint}")


def run_folders_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/metrics.jsonl")) if folder.is_dir() else []


def summarize_run(folder: Path, label: str, of: int) -> dict[str, Any]:
    """Everything the page shows of one run of `of`, as plain data."""
    strange: dict[str, str] = {}
    config = recipe_base(str(folder / "config.yaml"), strange)
    curves = {
        name: DownsampledSeries(MAX_CURVE_POINTS) for name in (*CURVE_METRICS, "worst_violation", "mean_violation")
    }
    maps = {name: DownsampledSeries(max(100, MAX_MAP_COLUMNS // of)) for name in LAYER_METRICS}
    last: dict[str, float] = {}
    step = -1
    for record in iterate_records(folder / "metrics.jsonl"):
        if not step < record["step"] < 2**53:
            continue
        step = record["step"]
        add_step_record(step, record, curves, maps, last)
    if step < 0:
        path = folder / "metrics.jsonl"
        raise UserError(f"{path} holds no step; expected one line a step: train first, or wait for the first line")
    load = read_expert_load(folder / "router.jsonl", MAX_LOAD_CELLS // of)
    return {
        "label": printable_text(label),
        "facts": describe_run(config, step),
        "strange": [printable_text(key) for key in strange],
        "last": {name: round_significant(value) for name, value in last.items()},
        "curves": {name: curve_columns(thinned) for name, thinned in curves.items() if thinned.columns},
        "layers": load["layers"] if load else [i for i in range(config.model.layers) if is_moe_layer(config.model, i)],
        "maps": {
            name: layer_heatmap(thinned, name in WORST_STEP_METRICS)
            for name, thinned in maps.items()
            if thinned.columns
        },
        "load": load,
    }


def add_step_record(
    step: int,
    record: dict[str, Any],
    curves: dict[str, DownsampledSeries],
    maps: dict[str, DownsampledSeries],
    last: dict[str, float],
) -> None:
    """Lay one line of metrics.jsonl into the curves and maps; what is no number is left out."""
    values = {name: as_float_array(record.get(name), 1) for name in LAYER_METRICS}
    found = {name: as_float_array(record.get(name), 0) for name in CURVE_METRICS}
    violation_L = values["max_violation"]
    if violation_L is not None:
        found |= {"worst_violation": violation_L.max(), "mean_violation": violation_L.mean()}
    for name, value in found.items():
        if value is not None and np.isfinite(value):
            curves[name].add(step, np.asarray(value))
            last[name] = float(value)
    for name, value_L in values.items():
        if value_L is not None:
            maps[name].add(step, value_L)
            last[name] = float(value_L.mean() if name == "drop_rate" else value_L.sum())


def as_float_array(value: Any, dims: int) -> np.ndarray | None:
    """The value as an array of so many dimensions, or None when it is not one, or empty."""
    try:
        array = np.asarray(value, dtype=np.float64) if value is not None else None
    except (ValueError, TypeError, OverflowError):
        return None
    return array if array is not None and array.ndim == dims and array.size else None


def curve_columns(thinned: DownsampledSeries) -> dict[str, Any]:
    """The mean of each column; and, where steps were joined, the least and the most of it."""
    told: dict[str, Any] = {**thinned.steps(), "mean": rounded_values([c.mean for c in thinned.columns])}
    if thinned.per > 1:
        told |= {
            "low": rounded_values([c.low for c in thinned.columns]),
            "high": rounded_values([c.high for c in thinned.columns]),
        }
    return told


def layer_heatmap(thinned: DownsampledSeries, worst: bool) -> dict[str, Any]:
    """A value for each layer of each column."""
    values = [rounded_values((c.high if worst else c.mean).tolist()) for c in thinned.columns]
    return {**thinned.steps(), "values": values}


def rounded_values(values: Sequence[Any]) -> list[float | None]:
    return [round_significant(float(value)) for value in values]


def round_significant(value: float) -> float | None:
    """Five digits say all a page can show; JSON has no word for what is no number."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() else short


def read_expert_load(path: Path, cells: int) -> dict[str, Any] | None:
    """The load of layers x experts x columns as multiples of the even share, coded; None when nothing was logged."""
    thinned: DownsampledSeries | None = None
    layers: list[int] = []
    for record in iterate_records(path):
        load_LE = as_float_array(record.get("load"), 2)
        if load_LE is None or not 0 <= record["step"] < 2**53:
            continue
        if thinned is None:
            thinned, layers = (
                DownsampledSeries(min(MAX_MAP_COLUMNS, cells // load_LE.size)),
                logged_layer_numbers(record, len(load_LE)),
            )
        total_L = load_LE.sum(axis=1, keepdims=True)
        thinned.add(record["step"], load_LE * load_LE.shape[1] / np.where(total_L > 0, total_L, np.nan))
    if thinned is None:
        return None
    ratios_CLE = np.stack([c.mean for c in thinned.columns])
    low, high, codes = encode_log_bytes(ratios_CLE)
    shape = {"layers": layers, "experts": ratios_CLE.shape[2], "low": low, "high": high}
    return {**thinned.steps(), **shape, "codes": base64.b64encode(codes.tobytes()).decode()}


def logged_layer_numbers(record: dict[str, Any], count: int) -> list[int]:
    """The layers' numbers as logged, or counted from zero where the line does not say."""
    layers = as_float_array(record.get("layers"), 1)
    known = layers is not None and len(layers) == count and np.isfinite(layers).all()
    return [int(layer) for layer in layers] if layers is not None and known else list(range(count))


def encode_log_bytes(ratios: np.ndarray) -> tuple[float, float, np.ndarray]:
    """One byte a ratio, 1 to 254 evenly on a log scale from the lowest to the highest there is: loads between 1/32
    and 8 times the even share are told to about one per cent."""
    positive = ratios[np.isfinite(ratios) & (ratios > 0)]
    low, high = (float(np.log2(positive.min())), float(np.log2(positive.max()))) if positive.size else (0.0, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        place = 1 + np.rint((np.log2(ratios) - low) / max(high - low, 1e-9) * 253)
    codes = np.where(ratios > 0, place, np.where(np.isfinite(ratios), CODE_NONE, CODE_UNKNOWN))
    return low, high, codes.astype(np.uint8)


def describe_run(config: Config, step: int) -> list[tuple[str, str]]:
    """The run in a few lines, each a name and a text."""
    model, moe, train, parallel = config.model, config.model.moe, config.train, config.parallel
    routed = sum(is_moe_layer(model, i) for i in range(model.layers))
    balance = [
        f"bias rate {moe.balance.bias_rate:g}" if moe.balance.bias_rate else "",
        f"loss {moe.balance.aux_loss:g}" if moe.balance.aux_loss else "",
    ]
    capacity = f"capacity {moe.capacity.factor:g} x even" if moe.capacity.factor else "dropless"
    layout = ", ".join(f"{axis} {size}" for axis, size in vars(parallel).items() if isinstance(size, int))
    return [
        ("model", printable_text(config.name)),
        (
            "parameters",
            f"{compact_number(total_parameters(model))}, {compact_number(active_parameters(model))} active per token",
        ),
        ("experts", f"{moe.experts}, {moe.top_k} per token, in {routed} of {model.layers} layers"),
        ("balance", f"{' and '.join(filter(None, balance)) or 'none'}; {capacity}"),
        ("steps", f"{step:,} of {train.steps:,}"),
        ("tokens", f"{compact_number(step * train.global_batch * config.data.seq_len)}"),
        ("batch", f"{train.global_batch} sequences of {config.data.seq_len} tokens"),
        ("layout", layout),
        ("precision", f"{train.precision} on {train.device}"),
        ("data", printable_text(config.data.source)),
    ]
