"""`moefold bench errors`: how far an MoE layer's output and gradients are from fp64, for every precision recipe.

All layers have the same bf16 weights, tokens and output gradient, drawn at random; the judge is the layer in fp64 with
the same numbers. Tokens are those whose choice of experts is clear, so that every layer routes them alike. An error is
|a - b| / |b| over all entries. T tokens, K experts of a token, D hidden width, F inner width, E experts.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from torch import Tensor, nn

from moefold.api.moe_layer import MoeLayer, layer_recipes
from moefold.bench.layer import LAYER_SHAPES, BuiltLayer, LayerBuilder, LayerForward, LayerShape, transformers_layer
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import ErrorsOptions
from moefold.bench.report import Report, Row, add_number_columns, report_heading, report_table, show_report
from moefold.bench.versions import installed_version
from moefold.config.errors import all_of
from moefold.precision.recipes import attach_recipes
from moefold.train.assemble import choose_kernels

CPU_SHAPES = {  # the same kinds of layers, scaled down
    "olmoe-7b": LayerShape(256, 128, 16, 4, 128),
    "qwen3-30b-a3b": LayerShape(384, 128, 32, 4, 128),
    "mixtral-8x7b": LayerShape(128, 512, 8, 2, 128),
}
SPARE = 8  # tokens drawn for each that is used
CLEAR = 0.05  # least distance between the logits of the last expert chosen and the first left out
RESULTS = ("output", "dx", "dW up", "dW down", "dW router")
CAPTION = "Relative error against fp64 in percent. bf16: moefold without a recipe. HF bf16: transformers' layer."


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
    "fp8_block, e5m2 gradients": Variant("fp8_block", E5M2_GRADIENTS),
    "fp8_tensor": Variant("fp8_tensor", AS_IT_IS),
    "fp8_tensor, e5m2 gradients": Variant("fp8_tensor", E5M2_GRADIENTS),
    "fp8_row": Variant("fp8_row", AS_IT_IS),
    "fp8_row, e5m2 gradients": Variant("fp8_row", E5M2_GRADIENTS),
    "fp8_hybrid": Variant("fp8_hybrid", AS_IT_IS),
    "fp8_hybrid, e5m2 gradients": Variant("fp8_hybrid", E5M2_GRADIENTS),
}
TRANSFORMERS = "HF bf16"
LayerResults = dict[str, Tensor]  # those named in RESULTS
ResultErrors = dict[str, float]  # of each


class LayerNumbers(NamedTuple):
    """Weights of router, first and second product, tokens, and the gradient of the output; bf16."""

    router_ED: Tensor
    up_END: Tensor
    down_EDF: Tensor
    x_TD: Tensor
    dy_TD: Tensor


def run_benchmark(options: ErrorsOptions) -> int:
    report = errors_report(options)
    return show_report(report, options.json, print_errors_report)


def errors_report(options: ErrorsOptions) -> Report:
    device = resolve_device(options.device)
    shapes = LAYER_SHAPES if device == "cuda" else CPU_SHAPES
    names = all_of("layer", options.layer, shapes)
    results: list[Row] = []
    for name in names or CPU_SHAPES:
        shape = shapes[name]
        row: Row = {"layer": name, **asdict(shape)}
        row["errors"] = layer_errors(shape, device)
        results.append(row)
    return machine_facts(device) | {"results": results}


def layer_errors(shape: LayerShape, device: str) -> dict[str, ResultErrors]:
    """The error of each result of each contender."""
    numbers = draw_numbers(shape, device)
    build_exact = partial(moefold_contender, shape, PLAIN_VARIANT, device, torch.float64)
    judge = results_of(build_exact, numbers)
    contenders = error_contenders(shape, device)
    errors: dict[str, ResultErrors] = {}
    for name, build in contenders.items():
        results = results_of(build, numbers)
        errors[name] = relative_errors(results, judge)
        free_device_memory(device)
    return errors


def error_contenders(shape: LayerShape, device: str) -> dict[str, LayerBuilder]:
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
    recipe = variant.recipe
    module = MoeLayer(*sizes, device=device, dtype=dtype, initialise=False, recipe=recipe)
    config = module.config
    precision = replace(config.precision, **variant.options)
    kernels = choose_kernels(config, module.world)
    recipes = layer_recipes(config)
    attach_recipes(module.layer, recipes, kernels, precision)

    def forward_alone(h_TD: Tensor) -> Tensor:
        output_TD, _ = module(h_TD)
        return output_TD

    return forward_alone, module


def results_of(build: LayerBuilder, numbers: LayerNumbers) -> LayerResults:
    forward, module = build()
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


def print_errors_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(heading, caption=CAPTION, box=SIMPLE_HEAD)
    table.add_column("layer", no_wrap=True)
    table.add_column("recipe", no_wrap=True)
    add_number_columns(table, *RESULTS)
    for row in report["results"]:
        layer = row["layer"]
        for name, errors in row["errors"].items():
            cells = [f"{100 * errors[key]:.2f}" for key in RESULTS]
            table.add_row(layer, name, *cells)
        table.add_section()
    Console().print(table)
