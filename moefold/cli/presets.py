"""`moefold presets`: the presets with their sizes and what sets each apart. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moefold.anatomy.model_totals import active_parameters, total_parameters
from moefold.bench.report import show_report
from moefold.config.run import ModelConfig
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options
from moefold.presets.zoo import PRESETS
from moefold.printable import human_readable

Row = dict[str, Any]
HEADINGS = ("preset", "total", "active", "layers", "experts", "attn", "besides")


@dataclass(frozen=True)
class PresetsOptions:
    """List the models that ship with moefold: parameters, active parameters of a token, layers, experts of a layer and
    of a token, attention, and what else a model has."""

    json: bool = False
    """Print JSON, with the tiny variants, instead of a table."""


FORM = CommandForm("presets", PresetsOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    names = list(PRESETS)
    if not options.json:
        names = [name for name in names if not is_tiny_variant(name)]
    rows = list(map(describe_preset, names))
    return show_report({"presets": rows}, options.json, print_presets)


def is_tiny_variant(name: str) -> bool:
    return name.removesuffix("-tiny") != name


def describe_preset(name: str) -> Row:
    model = PRESETS[name]().model
    return {
        "name": name,
        "parameters": total_parameters(model),
        "active_parameters": active_parameters(model),
        "layers": model.layers,
        "experts": model.moe.experts,
        "top_k": model.moe.top_k,
        "attention": model.attention.kind,
        "besides": model_features(model),
    }


def model_features(model: ModelConfig) -> str:
    """What a model has besides attention and softmax-routed experts, in a few words."""
    attention, moe = model.attention, model.moe
    features = {
        f"{moe.dense_layers} dense layer{'s' * (moe.dense_layers > 1)}": moe.dense_layers,
        f"experts every {moe.every} layers": moe.every > 1,
        "shared expert": moe.shared_ffn,
        f"latent of {moe.latent}": moe.latent,
        "sigmoid": moe.router.score == "sigmoid",
        f"{moe.router.groups_chosen}/{moe.router.groups} groups": moe.router.groups > 1,
        f"window of {attention.window}": attention.window,
        "sinks": attention.sinks,
        "qk-norm": attention.qk_norm != "none",
        f"{model.mtp} MTP": model.mtp,
    }
    present = [text for text, has in features.items() if has]
    return ", ".join(present) or "-"


def print_presets(report: Row) -> None:
    rows: list[tuple[str, ...]] = [HEADINGS]
    for preset in report["presets"]:
        rows.append(preset_cells(preset))
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for row in rows:
        name, *numbers, attention, features = row
        cells = [name.ljust(widths[0])]
        numbered = zip(numbers, widths[1:], strict=False)
        cells += [text.rjust(width) for text, width in numbered]
        cells += [attention.ljust(widths[-2]), features]
        print("  ".join(cells))
    print("\nEach but tiny and starter has a small variant for a CPU: NAME-tiny. Details: moefold explain NAME")


def preset_cells(row: Row) -> tuple[str, ...]:
    return (
        row["name"],
        human_readable(row["parameters"]),
        human_readable(row["active_parameters"]),
        str(row["layers"]),
        f"{row['experts']} x {row['top_k']}",
        row["attention"],
        row["besides"],
    )
