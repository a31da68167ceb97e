"""Summary of a run for a report, read from the run's folder and downsampled to the resolution of a page.

config.yaml     the run's configuration       -> facts
metrics.jsonl   one line per step             -> curves, and maps of layers x steps
router.jsonl    one line every few steps      -> the load of layers x experts x steps, one byte each
restarts.jsonl  one line per restart          -> facts
times.jsonl     one line every few steps      -> facts
fp8.jsonl       one line every few steps      -> maps of layers x steps of each kind of FP8 operand (fp8_summary.py)
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from moefold.anatomy.model_totals import active_parameters, total_parameters
from moefold.anatomy.step_specs import is_moe_layer
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.run import Config, MoeConfig
from moefold.observe.metrics import iterate_records, read_records
from moefold.observe.progress import compact_number
from moefold.observe.rank_times import TIMES_FILE
from moefold.presets.recipe import recipe_base
from moefold.web.downsample import DownsampledSeries
from moefold.web.fp8_summary import read_fp8_operands
from moefold.web.page_numbers import MOST_STEPS, JsonObject, as_float_array, round_significant, rounded_values

CURVE_METRICS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "tflops")
LAYER_METRICS = ("max_violation", "load_entropy", "dead_experts", "drop_rate", "moved_bytes")
WORST_STEP_METRICS = ("max_violation", "dead_experts")  # a column shows its worst step; of the others, the mean

MAX_CURVE_POINTS = 800  # of a curve
MAX_MAP_COLUMNS = 400  # of all runs' maps together
MAX_LOAD_CELLS = 2_000_000  # of all runs' loads together: a byte each, four thirds of that in the page

MIN_MAP_COLUMNS = 100
CODE_NONE = 0  # code of an expert that got no token
CODE_UNKNOWN = 255  # code of an expert that was not measured
HIGHEST_CODE = 254
SHOWN_RUNS = 5
SHOWN_RESTARTS = 5
RUN_FILES = ("config.yaml", "metrics.jsonl")


def require_run_folder(folder: Path) -> None:
    """Refuse a folder that holds no run, with advice."""
    if not folder.exists():
        siblings = run_folders_in(folder.parent)
        guess = did_you_mean(str(folder), map(str, siblings))
        expected = "expected the folder of a run, as `moefold train` names when it ends"
        raise UserError(f"no folder {folder}{guess}; {expected}")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; expected the folder of a run, such as {folder.parent}")
    missing: list[str] = []
    for name in RUN_FILES:
        path = folder / name
        if not path.is_file():
            missing.append(name)
    if missing:
        hint = "give a folder `moefold train` wrote"
        runs = run_folders_in(folder)
        if runs:
            shown = map(str, runs[:SHOWN_RUNS])
            inside = ", ".join(shown)
            hint = f"there are runs inside: {inside}"
        files = " and no ".join(missing)
        raise UserError(f"{folder} is no run: it has no {files}; {hint}")


def run_folders_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    metrics = folder.glob("*/metrics.jsonl")
    return sorted(path.parent for path in metrics)


class MetricSeries:
    """Curves and layer maps of a run, filled line by line from metrics.jsonl."""

    def __init__(self, map_columns: int):
        self.curves: dict[str, DownsampledSeries] = {}
        for name in (*CURVE_METRICS, "worst_violation", "mean_violation"):
            self.curves[name] = DownsampledSeries(MAX_CURVE_POINTS)
        self.maps: dict[str, DownsampledSeries] = {}
        for name in LAYER_METRICS:
            self.maps[name] = DownsampledSeries(map_columns)
        self.last: dict[str, float] = {}
        self.last_step = -1

    def add_record(self, record: JsonObject) -> None:
        """Add one line; values that are no numbers, and steps that do not ascend, are left out."""
        step = record["step"]
        if not self.last_step < step < MOST_STEPS:
            return
        self.last_step = step
        # Curves: one number a step.
        curves: JsonObject = {}
        for name in CURVE_METRICS:
            value = record.get(name)
            curves[name] = as_float_array(value, 0)
        violation_L = as_float_array(record.get("max_violation"), 1)
        if violation_L is not None:
            curves["worst_violation"] = violation_L.max()
            curves["mean_violation"] = violation_L.mean()
        for name, value in curves.items():
            if value is not None and np.isfinite(value):
                series = self.curves[name]
                series.add_step(step, np.asarray(value))
                self.last[name] = float(value)
        # Maps: one number a layer.
        for name in LAYER_METRICS:
            value_L = as_float_array(record.get(name), 1)
            if value_L is None:
                continue
            series = self.maps[name]
            series.add_step(step, value_L)
            total = value_L.sum()
            if name == "drop_rate":
                total = value_L.mean()
            self.last[name] = float(total)

    def last_values(self) -> dict[str, float | None]:
        rounded: dict[str, float | None] = {}
        for name, value in self.last.items():
            rounded[name] = round_significant(value)
        return rounded

    def curve_data(self) -> JsonObject:
        curves: JsonObject = {}
        for name, series in self.curves.items():
            if series.columns:
                curves[name] = curve_columns(series)
        return curves

    def map_data(self) -> JsonObject:
        maps: JsonObject = {}
        for name, series in self.maps.items():
            if series.columns:
                maps[name] = layer_heatmap(name, series)
        return maps


def summarize_run(folder: Path, label: str, runs: int) -> JsonObject:
    """Summary of one of `runs` runs, as plain data for the page."""
    unknown_keys: dict[str, str] = {}
    config = recipe_base(str(folder / "config.yaml"), unknown_keys)
    path = folder / "metrics.jsonl"
    map_columns = max(MIN_MAP_COLUMNS, MAX_MAP_COLUMNS // runs)
    series = MetricSeries(map_columns)
    for record in iterate_records(path):
        series.add_record(record)
    if series.last_step < 0:
        raise UserError(f"{path} holds no step; expected one line per step: train first, or wait for the first line")
    load = read_expert_load(folder / "router.jsonl", MAX_LOAD_CELLS // runs)
    layers = load["layers"] if load else moe_layer_numbers(config)
    return {
        "label": printable_text(label),
        "facts": [*describe_run(config, series.last_step), *describe_faults(folder)],
        "strange": [printable_text(key) for key in unknown_keys],
        "last": series.last_values(),
        "curves": series.curve_data(),
        "layers": layers,
        "maps": series.map_data(),
        "load": load,
        "fp8": read_fp8_operands(folder / "fp8.jsonl", map_columns // 2),
    }


def moe_layer_numbers(config: Config) -> list[int]:
    model = config.model
    layers = range(model.layers)
    return [layer for layer in layers if is_moe_layer(model, layer)]


def curve_columns(series: DownsampledSeries) -> JsonObject:
    """The mean of each column; and, where steps were merged, its minimum and maximum."""
    columns: JsonObject = dict(series.column_steps())
    means = [column.mean for column in series.columns]
    columns["mean"] = rounded_values(means)
    if series.lines_per_column > 1:
        lows = [column.low for column in series.columns]
        highs = [column.high for column in series.columns]
        columns["low"] = rounded_values(lows)
        columns["high"] = rounded_values(highs)
    return columns


def layer_heatmap(name: str, series: DownsampledSeries) -> JsonObject:
    """A value for each layer of each column."""
    heatmap: JsonObject = dict(series.column_steps())
    values: list[list[float | None]] = []
    for column in series.columns:
        value_L = column.high if name in WORST_STEP_METRICS else column.mean
        rounded = rounded_values(value_L.tolist())
        values.append(rounded)
    heatmap["values"] = values
    return heatmap


def read_expert_load(path: Path, cells: int) -> JsonObject | None:
    """The load of layers x experts x columns as multiples of the even share, coded; None when nothing was logged."""
    series: DownsampledSeries | None = None
    layers: list[int] = []
    for record in iterate_records(path):
        load_LE = as_float_array(record.get("load"), 2)
        step = record["step"]
        if load_LE is None or not 0 <= step < MOST_STEPS:
            continue
        if series is None:
            columns = min(MAX_MAP_COLUMNS, cells // load_LE.size)
            series = DownsampledSeries(columns)
            layers = logged_layer_numbers(record, len(load_LE))
        series.add_step(step, even_share_multiples(load_LE))
    if series is None:
        return None
    means = [column.mean for column in series.columns]
    ratios_CLE = np.stack(means)
    low, high, codes = encode_log_bytes(ratios_CLE)
    load: JsonObject = dict(series.column_steps())
    load["layers"] = layers
    load["experts"] = ratios_CLE.shape[2]
    load["low"] = low
    load["high"] = high
    encoded = base64.b64encode(codes.tobytes())
    load["codes"] = encoded.decode()
    return load


def even_share_multiples(load_LE: np.ndarray) -> np.ndarray:
    """Loads as multiples of a layer's even share; not a number for layers without tokens."""
    experts = load_LE.shape[1]
    total_L1 = load_LE.sum(axis=1, keepdims=True)
    divisor_L1 = np.where(total_L1 > 0, total_L1, np.nan)
    return load_LE * experts / divisor_L1


def logged_layer_numbers(record: JsonObject, count: int) -> list[int]:
    """The layers' numbers as logged, or counted from zero where the line has none."""
    layers = as_float_array(record.get("layers"), 1)
    if layers is None or len(layers) != count:
        return list(range(count))
    if not np.isfinite(layers).all():
        return list(range(count))
    return [int(layer) for layer in layers]


def encode_log_bytes(ratios: np.ndarray) -> tuple[float, float, np.ndarray]:
    """One byte a ratio, 1 to 254 evenly on a log scale from the lowest to the highest there is: loads between 1/32
    and 8 times the even share are exact to about one per cent."""
    finite = np.isfinite(ratios)
    is_positive = ratios > 0
    positive = ratios[finite & is_positive]
    low = 0.0
    high = 0.0
    if positive.size:
        low = float(np.log2(positive.min()))
        high = float(np.log2(positive.max()))
    span = max(high - low, 1e-9)
    codes_above_first = HIGHEST_CODE - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (np.log2(ratios) - low) / span
        place = 1 + np.rint(share * codes_above_first)
    without_tokens = np.where(finite, CODE_NONE, CODE_UNKNOWN)
    codes = np.where(is_positive, place, without_tokens)
    return low, high, codes.astype(np.uint8)


def describe_run(config: Config, step: int) -> list[tuple[str, str]]:
    """The run in a few lines, each a name and a text."""
    model = config.model
    moe = model.moe
    train = config.train
    seq_len = config.data.seq_len
    parameters = compact_number(total_parameters(model))
    active = compact_number(active_parameters(model))
    routed = len(moe_layer_numbers(config))
    tokens = compact_number(step * train.global_batch * seq_len)
    return [
        ("model", printable_text(config.name)),
        ("parameters", f"{parameters}, {active} active per token"),
        ("experts", f"{moe.experts}, {moe.top_k} per token, in {routed} of {model.layers} layers"),
        ("balance", describe_balance(moe)),
        ("steps", f"{step:,} of {train.steps:,}"),
        ("tokens", tokens),
        ("batch", f"{train.global_batch} sequences of {seq_len} tokens"),
        ("layout", describe_degrees(config)),
        ("precision", describe_precision(config)),
        ("data", printable_text(config.data.source)),
    ]


def describe_faults(folder: Path) -> list[tuple[str, str]]:
    """What has disturbed the run, each a name and a text."""
    facts = [("restarts", describe_restarts(folder))]
    slow = describe_times(folder)
    if slow:
        facts.append(("times of ranks", slow))
    return facts


def describe_times(folder: Path) -> str:
    """How the last steps of the ranks were spent, and the last rank or link that was slow; empty where nothing is
    known, as of a single rank."""
    last: JsonObject = {}
    slow = "no rank was slow"
    for record in iterate_records(folder / TIMES_FILE):
        last = record
        if "slow" in record:
            slow = f"step {record['step']}: {printable_text(str(record['slow']))}"
    compute_R = as_float_array(last.get("compute"), 1)
    waiting_R = as_float_array(last.get("waiting"), 1)
    sending = as_float_array(last.get("communication"), 0)
    if compute_R is None or waiting_R is None or sending is None:
        return ""
    means = [("compute", compute_R.mean()), ("communication", sending), ("waiting", waiting_R.mean())]
    shown = ", ".join(f"{name} {1e3 * float(seconds):.3g} ms" for name, seconds in means)
    return f"{shown} a step; {slow}"


def describe_restarts(folder: Path) -> str:
    """How often the run was started again after a fault, and the causes of the last few."""
    records = read_records(folder / "restarts.jsonl")
    restarts = [record for record in records if "restart" in record]
    causes = [f"step {record['step']}: {record.get('cause')}" for record in records[-SHOWN_RESTARTS:]]
    shown = "; ".join(map(printable_text, causes))
    return f"{len(restarts)} ({shown})" if causes else "none"


def describe_precision(config: Config) -> str:
    train = config.train
    model = f"{train.precision} on {train.device}"
    recipe = config.precision.recipe
    return model if recipe == "plain" else f"{model}; products in {recipe}"


def describe_balance(moe: MoeConfig) -> str:
    means: list[str] = []
    if moe.balance.bias_rate:
        means.append(f"bias rate {moe.balance.bias_rate:g}")
    if moe.balance.aux_loss:
        means.append(f"loss {moe.balance.aux_loss:g}")
    balance = " and ".join(means) or "none"
    capacity = "dropless"
    if moe.capacity.factor:
        capacity = f"capacity {moe.capacity.factor:g} x even"
    return f"{balance}; {capacity}"


def describe_degrees(config: Config) -> str:
    degrees: list[str] = []
    for axis, size in vars(config.parallel).items():
        if isinstance(size, int):
            degrees.append(f"{axis} {size}")
    return ", ".join(degrees)
