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
from rich.table import Table
from torch import Tensor, nn

from moefold.api.moe_layer import MoeLayer, layer_recipes
from moefold.bench.layer import LAYER_SHAPES, BuiltLayer, LayerForward, LayerShape, transformers_layer
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import ErrorsOptions
from moefold.bench.report import Report, Row, add_number_columns, report_heading, show_report
from moefold.bench.versions import installed_version
from moefold.config.errors import one_of
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


PLAIN_VARIANT = Variant("plain", {})
VARIANTS = {
    "bf16": PLAIN_VARIANT,
    "fp8_block": Variant("fp8_block", {}),
    "fp8_block, powers of two": Variant("fp8_block", {"power_of_two_scales": True}),
    "fp8_block, e5m2 gradients": Variant("fp8_block", {"gradient_format": "e5m2"}),
    "fp8_tensor": Variant("fp8_tensor", {}),
    "fp8_tensor, e5m2 gradients": Variant("fp8_tensor", {"gradient_format": "e5m2"}),
    "fp8_row": Variant("fp8_row", {}),
    "fp8_row, e5m2 gradients": Variant("fp8_row", {"gradient_format": "e5m2"}),
    "fp8_hybrid": Variant("fp8_hybrid", {}),
    "fp8_hybrid, e5m2 gradients": Variant("fp8_hybrid", {"gradient_format": "e5m2"}),
}
TRANSFORMERS = "HF bf16"


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
    names = [one_of("layer", name, shapes) for name in options.layer]
    results: list[Row] = []
    for name in names or CPU_SHAPES:
        shape = shapes[name]
        errors = layer_errors(shape, device)
        results.append({"layer": name, **asdict(shape), "errors": errors})
    return machine_facts(device) | {"results": results}


def layer_errors(shape: LayerShape, device: str) -> dict[str, dict[str, float]]:
    """The error of each result of each contender."""
    numbers = draw_numbers(shape, device)
    judge = results_of(moefold_contender(shape, PLAIN_VARIANT, device, torch.float64), numbers)
    contenders = {
        name: partial(moefold_contender, shape, variant, device, torch.bfloat16) for name, variant in VARIANTS.items()
    }
    if installed_version("transformers"):
        contenders[TRANSFORMERS] = partial(transformers_layer, shape, device, torch.bfloat16)
    errors: dict[str, dict[str, float]] = {}
    for name, build in contenders.items():
        results = results_of(build(), numbers)
        errors[name] = {key: relative_error(results[key], judge[key]) for key in RESULTS}
        free_device_memory(device)
    return errors


def draw_numbers(shape: LayerShape, device: str) -> LayerNumbers:
    generator = torch.Generator(device).manual_seed(0)
    d, f, e = shape.hidden, shape.ffn, shape.experts

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(sizes, device=device, generator=generator) * scale
        return drawn.bfloat16()

    router_ED = draw(e, d, scale=d**-0.5)
    up_END = draw(e, 2 * f, d, scale=d**-0.5)
    down_EDF = draw(e, d, f, scale=f**-0.5)
    x_TD = clear_tokens(draw(SPARE * shape.tokens, d), router_ED, shape)
    return LayerNumbers(router_ED, up_END, down_EDF, x_TD, draw(len(x_TD), d))


def clear_tokens(x_ND: Tensor, router_ED: Tensor, shape: LayerShape) -> Tensor:
    """The first T tokens whose K experts no rounding can change; fewer where there are not so many."""
    logits_NE = x_ND.double() @ router_ED.double().T
    best_NK = logits_NE.topk(shape.top_k + 1, dim=1).values
    distance_N = best_NK[:, -2] - best_NK[:, -1]
    clear_N = (distance_N > CLEAR).nonzero()[:, 0]
    return x_ND[clear_N[: shape.tokens]]


def moefold_contender(shape: LayerShape, variant: Variant, device: str, dtype: torch.dtype) -> BuiltLayer:
    sizes = (shape.hidden, shape.experts, shape.top_k, shape.ffn)
    module = MoeLayer(*sizes, device=device, dtype=dtype, initialise=False, recipe=variant.recipe)
    precision = replace(module.config.precision, **variant.options)
    kernels = choose_kernels(module.config, module.world)
    attach_recipes(module.layer, layer_recipes(module.config), kernels, precision)

    def forward_alone(h_TD: Tensor) -> Tensor:
        output_TD, _ = module(h_TD)
        return output_TD

    return forward_alone, module


def results_of(built: BuiltLayer, numbers: LayerNumbers) -> dict[str, Tensor]:
    forward, module = built
    router, up, down = layer_weights(module)
    with torch.no_grad():
        for weight, values in zip((router, up, down), numbers[:3], strict=True):
            weight.copy_(values.view_as(weight))
    x_TD = numbers.x_TD.to(down.dtype, copy=True).requires_grad_()
    y_TD = run_backward(forward, x_TD, numbers.dy_TD)
    found = (y_TD, x_TD.grad, up.grad, down.grad, router.grad)
    return {name: as_tensor(value) for name, value in zip(RESULTS, found, strict=True)}


def layer_weights(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Router, first and second product, of moefold's layer or of transformers'."""
    named = dict(module.named_parameters())
    ends = (("router.weight", "gate.weight"), ("gate_up", "gate_up_proj"), ("down", "down_proj"))
    router, up, down = [next(p for name, p in named.items() if name.endswith(both)) for both in ends]
    return router, up, down


def run_backward(forward: LayerForward, x_TD: Tensor, dy_TD: Tensor) -> Tensor:
    y_TD = forward(x_TD)
    y_TD.backward(dy_TD.to(y_TD.dtype))
    return y_TD.detach()


def as_tensor(value: Tensor | None) -> Tensor:
    assert value is not None, "a weight or the input has no gradient"
    return value


def relative_error(found: Tensor, judge: Tensor) -> float:
    difference = found.double().view_as(judge) - judge
    return (difference.norm() / judge.norm()).item()


def print_errors_report(report: Report) -> None:
    table = Table(
        title=report_heading(report),
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("layer", no_wrap=True)
    table.add_column("recipe", no_wrap=True)
    add_number_columns(table, *RESULTS)
    for row in report["results"]:
        for name, errors in row["errors"].items():
            cells = [f"{100 * errors[key]:.2f}" for key in RESULTS]
            table.add_row(row["layer"], name, *cells)
        table.add_section()
    Console().print(table)
