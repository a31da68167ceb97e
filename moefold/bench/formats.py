"""`moefold bench formats`: for every precision recipe, how far an MoE layer's output and gradients are from fp64, the
bytes that it saves for backward, and its time.

All layers have the same bf16 weights, tokens and output gradient, drawn at random; the judge is the layer in fp64 with
the same numbers. Tokens are those whose choice of experts is clear, so that every layer routes them alike. An error is
|a - b| / |b| over all entries. mxfp8 and nvfp4 are emulated where the card does not have them, and their time is that
of the emulation.
T tokens, K experts of a token, D hidden width, F inner width, E experts.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moefold.api.moe_layer import MoeLayer
from moefold.bench.clock import median_seconds
from moefold.bench.layer import LAYER_SHAPES, BuiltLayer, LayerBuilder, LayerForward, LayerShape, transformers_layer
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import FormatsOptions
from moefold.bench.report import Report, Row, add_number_columns, report_heading, report_table, show_report
from moefold.bench.timed_recipes import set_precision_keys
from moefold.bench.versions import installed_version
from moefold.config.errors import all_of
from moefold.train.step_profile import storage_address, unpacked_as_saved

CPU_SHAPES = {  # the same kinds of layers, scaled down
    "olmoe-7b": LayerShape(256, 128, 16, 4, 128),
    "qwen3-30b-a3b": LayerShape(384, 128, 32, 4, 128),
    "mixtral-8x7b": LayerShape(128, 512, 8, 2, 128),
}
SPARE = 8  # tokens drawn for each that is used
KIB = 1024
CLEAR = 0.05  # least distance between the logits of the last expert chosen and the first left out
RESULTS = ("output", "dx", "dW up", "dW down", "dW router")
CAPTION = (
    "Relative error against fp64 in percent; saved: KiB that forward saves for backward, without parameters; "
    "milliseconds of forward and backward. bf16: moefold without a recipe. HF bf16: transformers' layer. "
    "mxfp8 and nvfp4 are emulated."
)


class Variant(NamedTuple):
    """A recipe with options of the section `precision`."""

    recipe: str
    options: dict[str, Any]


AS_IT_IS: dict[str, Any] = {}
POWERS_OF_TWO = {"power_of_two_scales": True}
E5M2_GRADIENTS = {"gradient_format": "e5m2"}
PLAIN_VARIANT = Variant("plain", AS_IT_IS)
VARIANTS = {
    "bf16": PLAIN_VARIANT,
    "fp8_block": Variant("fp8_block", AS_IT_IS),
    "fp8_block, powers of two": Variant("fp8_block", POWERS_OF_TWO),
    "fp8_block, e5m2 dy": Variant("fp8_block", E5M2_GRADIENTS),
    "fp8_tensor": Variant("fp8_tensor", AS_IT_IS),
    "fp8_tensor, e5m2 dy": Variant("fp8_tensor", E5M2_GRADIENTS),
    "fp8_row": Variant("fp8_row", AS_IT_IS),
    "fp8_row, e5m2 dy": Variant("fp8_row", E5M2_GRADIENTS),
    "fp8_hybrid": Variant("fp8_hybrid", AS_IT_IS),
    "fp8_hybrid, e5m2 dy": Variant("fp8_hybrid", E5M2_GRADIENTS),
    "mxfp8": Variant("mxfp8", AS_IT_IS),
    "mxfp8, scales down": Variant("mxfp8", {"scale_rounding": "down"}),
    "mxfp8, weight squares": Variant("mxfp8", {"weight_blocks": "squares"}),
    "nvfp4": Variant("nvfp4", AS_IT_IS),
    "nvfp4, no Hadamard": Variant("nvfp4", {"hadamard": False}),
    "nvfp4, round to nearest": Variant("nvfp4", {"stochastic": False}),
    "nvfp4, weight rows": Variant("nvfp4", {"weight_blocks": "rows"}),
}
TRANSFORMERS = "HF bf16"
LayerResults = dict[str, Tensor]  # those named in RESULTS
ResultErrors = dict[str, float]  # of each


class FormatCost(NamedTuple):
    """What a contender's layer saves for backward in bytes, and the seconds of its forward and backward."""

    saved_bytes: int
    seconds: float


class FormatFigures(NamedTuple):
    errors: ResultErrors
    cost: FormatCost


class LayerNumbers(NamedTuple):
    """Weights of router, first and second product, tokens, and the gradient of the output; bf16."""

    router_ED: Tensor
    up_END: Tensor
    down_EDF: Tensor
    x_TD: Tensor
    dy_TD: Tensor


def run_benchmark(options: FormatsOptions) -> int:
    report = formats_report(options)
    return show_report(report, options.json, print_formats_report)


def formats_report(options: FormatsOptions) -> Report:
    device = resolve_device(options.device)
    shapes = LAYER_SHAPES if device == "cuda" else CPU_SHAPES
    names = all_of("layer", options.layer, shapes)
    results: list[Row] = []
    for name in names or CPU_SHAPES:
        shape = shapes[name]
        row: Row = {"layer": name, **asdict(shape)}
        figures = layer_figures(shape, device, options.repeat)
        row["errors"] = {recipe: found.errors for recipe, found in figures.items()}
        row["saved_bytes"] = {recipe: found.cost.saved_bytes for recipe, found in figures.items()}
        row["seconds"] = {recipe: found.cost.seconds for recipe, found in figures.items()}
        results.append(row)
    return machine_facts(device) | {"results": results}


def layer_figures(shape: LayerShape, device: str, repeat: int = 1) -> dict[str, FormatFigures]:
    """Errors and costs of each contender."""
    numbers = draw_numbers(shape, device)
    exact = moefold_contender(shape, PLAIN_VARIANT, device, torch.float64)
    judge = results_of(exact, numbers)
    figures: dict[str, FormatFigures] = {}
    for name, build in format_contenders(shape, device).items():
        layer = build()
        results = results_of(layer, numbers)
        errors = relative_errors(results, judge)
        cost = cost_of(layer, numbers, device, repeat)
        figures[name] = FormatFigures(errors, cost)
        free_device_memory(device)
    return figures


def format_contenders(shape: LayerShape, device: str) -> dict[str, LayerBuilder]:
    dtype = torch.bfloat16
    contenders: dict[str, LayerBuilder] = {}
    for name, variant in VARIANTS.items():
        contenders[name] = partial(moefold_contender, shape, variant, device, dtype)
    if installed_version("transformers"):
        contenders[TRANSFORMERS] = partial(transformers_layer, shape, device, dtype)
    return contenders


def draw_numbers(shape: LayerShape, device: str) -> LayerNumbers:
    generator = torch.Generator(device).manual_seed(0)
    d = shape.hidden
    f = shape.ffn
    e = shape.experts
    count = SPARE * shape.tokens

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(sizes, device=device, generator=generator)
        scaled = drawn * scale
        return scaled.bfloat16()

    of_hidden = d**-0.5
    of_inner = f**-0.5
    router_ED = draw(e, d, scale=of_hidden)
    up_END = draw(e, 2 * f, d, scale=of_hidden)
    down_EDF = draw(e, d, f, scale=of_inner)
    x_ND = draw(count, d)
    x_TD = clear_tokens(x_ND, router_ED, shape)
    dy_TD = draw(len(x_TD), d)
    return LayerNumbers(router_ED, up_END, down_EDF, x_TD, dy_TD)


def clear_tokens(x_ND: Tensor, router_ED: Tensor, shape: LayerShape) -> Tensor:
    """The first T tokens whose K experts no rounding can change; fewer where there are not so many."""
    router_DE = router_ED.double().T
    logits_NE = x_ND.double() @ router_DE
    best = logits_NE.topk(shape.top_k + 1, dim=1)
    *_, last_chosen_N, first_left_N = best.values.unbind(1)
    distance_N = last_chosen_N - first_left_N
    is_clear_N = distance_N > CLEAR
    (clear_C,) = is_clear_N.nonzero(as_tuple=True)
    return x_ND[clear_C[: shape.tokens]]


def moefold_contender(shape: LayerShape, variant: Variant, device: str, dtype: torch.dtype) -> BuiltLayer:
    sizes = shape.hidden, shape.experts, shape.top_k, shape.ffn
    module = MoeLayer(*sizes, device=device, dtype=dtype, initialise=False)
    set_precision_keys(module, {"recipe": variant.recipe, **variant.options})

    def forward_alone(h_TD: Tensor) -> Tensor:
        output_TD, _ = module(h_TD)
        return output_TD

    return forward_alone, module


def results_of(layer: BuiltLayer, numbers: LayerNumbers) -> LayerResults:
    forward, module = layer
    router = weight_named(module, "router.weight", "gate.weight")
    up = weight_named(module, "gate_up", "gate_up_proj")
    down = weight_named(module, "down", "down_proj")
    set_weight(router, numbers.router_ED)
    set_weight(up, numbers.up_END)
    set_weight(down, numbers.down_EDF)
    x_TD = numbers.x_TD.to(down.dtype, copy=True)
    x_TD.requires_grad_()
    y_TD = run_backward(forward, x_TD, numbers.dy_TD)
    found = {
        "output": y_TD,
        "dx": x_TD.grad,
        "dW up": up.grad,
        "dW down": down.grad,
        "dW router": router.grad,
    }
    return {name: as_tensor(value) for name, value in found.items()}


def cost_of(layer: BuiltLayer, numbers: LayerNumbers, device: str, repeat: int) -> FormatCost:
    forward, module = layer
    x_TD = numbers.x_TD.clone().requires_grad_()
    saved = bytes_saved(layer, x_TD)
    run = partial(run_backward, forward, x_TD, numbers.dy_TD)
    seconds = median_seconds(run, device, repeat)
    module.zero_grad()
    return FormatCost(saved, seconds)


def bytes_saved(layer: BuiltLayer, x_TD: Tensor) -> int:
    """Bytes of what forward saves for backward, each storage once, without parameters."""
    forward, module = layer
    storages: dict[int, int] = {}

    def count(saved: Tensor) -> Tensor:
        address = storage_address(saved)
        storages[address] = saved.untyped_storage().nbytes()
        return saved

    with saved_tensors_hooks(count, unpacked_as_saved):
        forward(x_TD)
    for parameter in module.parameters():
        storages.pop(storage_address(parameter), None)
    return sum(storages.values())


def weight_named(module: nn.Module, *ends: str) -> Tensor:
    """The weight whose name has one of the ends, that of moefold's layer or that of transformers'."""
    for name, parameter in module.named_parameters():
        if name.endswith(ends):
            return parameter
    raise LookupError(f"no parameter ends with one of {ends}")


@torch.no_grad()
def set_weight(weight: Tensor, values: Tensor) -> None:
    weight.copy_(values.view_as(weight))


def run_backward(forward: LayerForward, x_TD: Tensor, dy_TD: Tensor) -> Tensor:
    y_TD = forward(x_TD)
    dy_TD = dy_TD.to(y_TD.dtype)
    y_TD.backward(dy_TD)
    return y_TD.detach()


def as_tensor(value: Tensor | None) -> Tensor:
    assert value is not None, "a weight or the input has no gradient"
    return value


def relative_errors(results: LayerResults, judge: LayerResults) -> ResultErrors:
    errors: ResultErrors = {}
    for name in RESULTS:
        errors[name] = relative_error(results[name], judge[name])
    return errors


def relative_error(found: Tensor, judge: Tensor) -> float:
    difference = found.double().view_as(judge) - judge
    error = difference.norm() / judge.norm()
    return error.item()


def print_formats_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(heading, caption=CAPTION, box=SIMPLE_HEAD)
    table.padding = 0, 1, 0, 0  # eight columns in a terminal of 80
    table.add_column("recipe", no_wrap=True)
    add_number_columns(table, *RESULTS, "saved", "ms")
    for row in report["results"]:
        table.add_row(f"[bold]{row['layer']}")
        for name, errors in row["errors"].items():
            cells = [f"{100 * errors[key]:.2f}" for key in RESULTS]
            saved = f"{row['saved_bytes'][name] / KIB:,.0f}"
            time = f"{1000 * row['seconds'][name]:.3g}"
            table.add_row(name, *cells, saved, time)
        table.add_section()
    Console().print(table)
