"""`moefold bench projections`: dense products of operands that are quantised already, forward, at sizes of attention
and MLPs. With scales in the epilogue (fp8_tensor, fp8_row) they are one product and a scale for each sum.

R rows, N outputs, K inputs.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from rich.console import Console
from torch import nn

from moefold.api.choices import module_config
from moefold.bench.calibrate import GEMM_SHAPES
from moefold.bench.clock import Work
from moefold.bench.layer import sustained_milliseconds
from moefold.bench.machine import machine_facts, resolve_device
from moefold.bench.options import ProjectionsOptions
from moefold.bench.report import Report, Row, add_number_columns, report_heading, report_table, show_report
from moefold.bench.timed_recipes import PrecisionKeys, changed_keys, recipes_in, recipes_title, with_precision_keys
from moefold.config.errors import all_of
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import Config
from moefold.precision.linear import Linear
from moefold.precision.recipes import attach_recipes
from moefold.train.assemble import choose_kernels, default_dtype

CPU_SHAPES = [(128, 256, 128)]
WARM_UP = 3
CAPTION = (
    "TF/s of forward products, operands quantised already, one after the other. plain: the same in the layer's type."
)


def run_benchmark(options: ProjectionsOptions) -> int:
    report = projections_report(options)
    return show_report(report, options.json, print_projections)


def projections_report(options: ProjectionsOptions) -> Report:
    device = resolve_device(options.device)
    recipes = all_of("recipe", options.recipe, RECIPE_SPECS)
    keys = changed_keys(options)
    precisions: dict[str, PrecisionKeys] = {"plain": {}}
    precisions |= {recipe: {"recipe": recipe, **keys} for recipe in recipes}
    results: list[Row] = []
    for shape in GEMM_SHAPES if device == "cuda" else CPU_SHAPES:
        rows, outputs, inputs = shape
        row: Row = {"rows": rows, "outputs": outputs, "inputs": inputs}
        for recipe, precision in precisions.items():
            work = projection(rows, outputs, inputs, device, precision)
            milliseconds = median_milliseconds(work, device, options.repeat)
            row[recipe] = 2e-9 * rows * outputs * inputs / milliseconds
        results.append(row)
    return machine_facts(device) | {"precision": keys, "results": results}


def projection(rows: int, outputs: int, inputs: int, device: str, precision: PrecisionKeys) -> Work:
    """The product of a layer with its recipe, on operands that it made."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config, world = module_config(Config(), device, dtype, None)
    config = with_precision_keys(config, precision)
    kernels = choose_kernels(config, world)
    with world.device, default_dtype(dtype):
        layer = Linear(world, inputs, outputs, std=0.02)
        nn.init.normal_(layer.weight, std=0.02)
        x_RK = torch.randn(rows, inputs)
    names = nn.ModuleDict({"projection": layer})
    attach_recipes(names, {"*": config.precision.recipe}, kernels, config.precision)
    weight_NK = layer.weight.detach()
    products = layer.recipe.products
    if products is None:
        return partial(torch.matmul, x_RK, weight_NK.T)
    x = layer.recipe.input(x_RK, None)
    w = layer.recipe.weight(weight_NK)
    return partial(products.forward, x, w, None)


def median_milliseconds(work: Work, device: str, repeat: int) -> float:
    for _ in range(WARM_UP):
        work()
    times = sustained_milliseconds(work, device, repeat)
    return median(times)


def print_projections(report: Report) -> None:
    table = report_table(report_heading(report), caption=f"{CAPTION} {recipes_title(report)}")
    first = report["results"][0]
    recipes = recipes_in(first)
    add_number_columns(table, "rows", "outputs", "inputs", *recipes)
    for row in report["results"]:
        sizes = [f"{row[name]:,}" for name in ("rows", "outputs", "inputs")]
        speeds = [f"{row[recipe]:.0f}" for recipe in recipes]
        table.add_row(*sizes, *speeds)
    Console().print(table)
