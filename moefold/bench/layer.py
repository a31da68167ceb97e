"""`moefold bench layer`: one MoE layer of known models, forward and backward, moefold's and transformers'.

TFLOP/s count 18 T K D F operations, the six products of the routed experts, over the time from the router's input to
the layer's output and back. Saved bytes are those held between forward and backward, the input included.
T tokens, K experts of a token, D hidden width, F inner width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import sleep
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from moefold.api.moe_layer import MoeLayer
from moefold.bench.clock import Work, busy_milliseconds, wall_clock_seconds
from moefold.bench.machine import GIB, free_device_memory, machine_facts, resolve_device, resolve_dtype
from moefold.bench.options import LayerOptions
from moefold.bench.report import Report, Row, add_number_columns, report_heading, report_table, show_report
from moefold.bench.timed_recipes import (
    PrecisionKeys,
    changed_keys,
    fill_histories,
    recipes_in,
    recipes_title,
    set_precision_keys,
)
from moefold.bench.versions import installed_version
from moefold.config.errors import all_of
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.layout.axes import single_rank_world
from moefold.layout.dtypes import DTYPES


@dataclass(frozen=True)
class LayerShape:
    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int

    @property
    def flops_per_step(self) -> float:
        products = 18.0 * self.tokens * self.top_k
        return products * self.hidden * self.ffn


LAYER_SHAPES = {
    "mixtral-8x7b": LayerShape(4096, 14336, 8, 2, 8192),
    "mixtral-8x22b": LayerShape(6144, 16384, 8, 2, 8192),
    "olmoe-7b": LayerShape(2048, 1024, 64, 8, 16384),
    "qwen3-30b-a3b": LayerShape(2048, 768, 128, 8, 16384),
    "qwen3-235b": LayerShape(4096, 1536, 128, 8, 16384),
    "dsv3-32of256": LayerShape(7168, 2048, 32, 8, 4096),
}
CPU_SHAPE = LayerShape(128, 256, 8, 2, 64)  # a smoke test where there is no GPU
STEPS_PER_MARK = 10

LAYER_CAPTION = (
    "TF/s: forward and backward of a whole layer, step after step. cool: the same after a pause, before the card slows "
    "down to stay within its power. GiB: held between forward and backward. Zipf: TF/s with skewed routing. kept: its "
    "share of the even figure. HF: transformers' grouped_mm layer. ratio: its time over ours, step after step."
)

RECIPE_CAPTION = (
    "Weights are quantised already, as in every microbatch of a step but the first. kernels: TF/s by the time in which "
    "kernels ran. ms: forward and backward. of plain: its time as a multiple of the layer's without a recipe; mxfp8 "
    "and nvfp4 are emulated, goal at most 2.00."
)

LayerForward = Callable[[Tensor], Tensor]
BuiltLayer = tuple[LayerForward, nn.Module]
LayerBuilder = Callable[[], BuiltLayer]


class LayerTiming(NamedTuple):
    milliseconds: float
    tflops: float
    cool_tflops: float
    kernel_tflops: float
    saved_gib: float


def run_benchmark(options: LayerOptions) -> int:
    report = layer_report(options)
    return show_report(report, options.json, print_layer_report)


def moefold_layer(
    layer: LayerShape, device: str, dtype: torch.dtype, zipf: bool = False, precision: PrecisionKeys | None = None
) -> BuiltLayer:
    """`moefold.MoeLayer`, with kernels chosen as in a run; with `zipf`, expert ids are imposed."""
    shape = layer.hidden, layer.experts, layer.top_k, layer.ffn
    module = MoeLayer(*shape, device=device, dtype=dtype, initialise=False)
    if precision:
        set_precision_keys(module, precision)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    expert_ids = zipf_expert_ids(layer, device) if zipf else None

    def forward_alone(h_TD: Tensor) -> Tensor:
        output_TD, _ = module(h_TD, expert_ids)
        return output_TD

    return forward_alone, module


def zipf_expert_ids(layer: LayerShape, device: str) -> Tensor:
    """K distinct experts for each token, expert i drawn in proportion to 1 / i."""
    numbers_E = torch.arange(1, layer.experts + 1, device=device)
    weights_E = 1 / numbers_E
    weights_TE = weights_E.expand(layer.tokens, -1)
    generator = torch.Generator(device).manual_seed(0)
    return torch.multinomial(weights_TE, layer.top_k, generator=generator)


def transformers_layer(layer: LayerShape, device: str, dtype: torch.dtype) -> BuiltLayer:
    from transformers import Qwen3MoeConfig  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen  # pyright: ignore[reportMissingImports]

    config = Qwen3MoeConfig(
        hidden_size=layer.hidden,
        moe_intermediate_size=layer.ffn,
        num_experts=layer.experts,
        num_experts_per_tok=layer.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(device):
        block = qwen.Qwen3MoeSparseMoeBlock(config).to(dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)

    def block_forward(h_TD: Tensor) -> Tensor:
        h_BTD = h_TD[None]
        out_BTD = block(h_BTD)
        return out_BTD[0]

    return block_forward, block


def measure_layer(built: BuiltLayer, layer: LayerShape, device: str, dtype: torch.dtype, repeat: int) -> LayerTiming:
    forward, module = built
    generator = torch.Generator(device).manual_seed(1)
    shape = (layer.tokens, layer.hidden)
    make_noise = partial(torch.randn, shape, device=device, generator=generator)
    h_TD = make_noise().to(dtype)
    h_TD.requires_grad_()
    d_TD = make_noise().to(dtype)

    def forward_backward() -> None:
        h_TD.grad = None
        module.zero_grad(set_to_none=True)
        forward(h_TD).backward(d_TD)

    world = single_rank_world(device)
    fill_histories(module, world, forward_backward)
    for _ in range(3):  # warm-up: compilation, autotuning, the allocator
        forward_backward()
    saved = saved_bytes(forward, h_TD, device)
    # Cool steps first: after the sustained ones the card has lowered its clock.
    cool_times = [cool_milliseconds(forward_backward, device) for _ in range(repeat)]
    cool = median(cool_times)
    times = sustained_milliseconds(forward_backward, device, repeat)
    sustained = median(times)
    busy = busy_milliseconds(forward_backward, torch.device(device))
    gflop = layer.flops_per_step / 1e9
    return LayerTiming(
        milliseconds=sustained,
        tflops=gflop / sustained,
        cool_tflops=gflop / cool,
        kernel_tflops=gflop / busy,
        saved_gib=saved / GIB,
    )


def saved_bytes(forward: LayerForward, h_TD: Tensor, device: str) -> int:
    """Bytes held between forward and backward: the input counts, the output does not."""
    before = allocated_bytes(device)
    out_TD = forward(h_TD)
    grown = allocated_bytes(device) - before
    return grown + h_TD.nbytes - out_TD.nbytes


def allocated_bytes(device: str) -> int:
    if device != "cuda":
        return 0
    return torch.cuda.memory_allocated()


def sustained_milliseconds(step: Work, device: str, repeat: int) -> list[float]:
    """Milliseconds of one step, as the mean of ten, `repeat` times. Steps follow each other without a wait, as in
    training: the host runs ahead of the device, and the card is at its working temperature."""
    if device != "cuda":
        seconds = [wall_clock_seconds(step) for _ in range(repeat)]
        return [1e3 * each for each in seconds]
    # The steps before the first mark let the host run ahead; times are taken between marks.
    timing_event = partial(torch.cuda.Event, enable_timing=True)
    marks = [timing_event() for _ in range(repeat + 1)]
    for mark in marks:
        for _ in range(STEPS_PER_MARK):
            step()
        mark.record()
    torch.cuda.synchronize()
    between = pairwise(marks)
    spans = [begin.elapsed_time(end) for begin, end in between]
    return [span / STEPS_PER_MARK for span in spans]


def cool_milliseconds(step: Work, device: str) -> float:
    """Milliseconds of one step, as the mean of two that follow a pause and two warm-up steps: before the card lowers
    its clock to stay within its power. Short benchmarks measure this time, training does not."""
    if device != "cuda":
        return wall_clock_seconds(step) * 1e3
    torch.cuda.synchronize()
    sleep(0.2)
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for mark in (begin, end):
        step()
        step()
        mark.record()
    end.synchronize()
    return begin.elapsed_time(end) / 2


def layer_report(options: LayerOptions) -> Report:
    """Every layer in turn: ours, ours with skewed routing, transformers'."""
    device = resolve_device(options.device)
    dtype_name = resolve_dtype(options.dtype, device)
    dtype = DTYPES[dtype_name]
    names = all_of("layer", options.layer, LAYER_SHAPES)
    recipes = all_of("recipe", options.recipe, RECIPE_SPECS)
    keys = changed_keys(options)
    precisions = {recipe: {"recipe": recipe, **keys} for recipe in recipes}
    layers = {"small": CPU_SHAPE}
    if device == "cuda":
        chosen = names or LAYER_SHAPES
        layers = {name: LAYER_SHAPES[name] for name in chosen}
    results: list[Row] = []
    for name, layer in layers.items():
        row: Row = {"layer": name, **asdict(layer)}
        results.append(row)
        contenders = layer_contenders(layer, device, dtype, precisions)
        for contender, build_layer in contenders.items():
            built = build_layer()
            timing = measure_layer(built, layer, device, dtype, options.repeat)
            row[contender] = timing._asdict()
            free_device_memory(device)
    return machine_facts(device) | {"precision": keys, "results": results}


def layer_contenders(
    layer: LayerShape, device: str, dtype: torch.dtype, precisions: dict[str, PrecisionKeys]
) -> dict[str, LayerBuilder]:  # fmt: skip
    build = partial(moefold_layer, layer, device, dtype)
    contenders: dict[str, LayerBuilder] = {}
    contenders["ours"] = build
    contenders["ours_zipf"] = partial(build, zipf=True)
    if installed_version("transformers"):
        contenders["transformers"] = partial(transformers_layer, layer, device, dtype)
    for recipe, keys in precisions.items():
        contenders[recipe] = partial(build, precision=keys)
    return contenders


def print_layer_report(report: Report) -> None:
    table = Table(
        title=report_heading(report),
        title_justify="left",
        caption=LAYER_CAPTION,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer", no_wrap=True)
    add_number_columns(table, "TF/s", "cool", "GiB", "Zipf", "kept")
    add_number_columns(table, "HF", "cool", "GiB", "ratio")
    for row in report["results"]:
        cells = own_cells(row) + transformers_cells(row)
        table.add_row(row["layer"], *cells)
    Console().print(table)
    first = report["results"][0]
    recipes = recipes_in(first)
    if recipes:
        print_recipes(report, recipes)


def print_recipes(report: Report, recipes: list[str]) -> None:
    """One line for each layer and recipe, beside the layer without one."""
    table = report_table(recipes_title(report), caption=RECIPE_CAPTION, box=SIMPLE_HEAD)
    table.add_column("layer", no_wrap=True)
    table.add_column("recipe", no_wrap=True)
    add_number_columns(table, "TF/s", "cool", "kernels", "ms", "of plain", "GiB", "GiB of plain")
    for row in report["results"]:
        layer = row["layer"]
        plain = row["ours"]
        plain_gib = max(plain["saved_gib"], 1e-9)
        for recipe in recipes:
            mine = row[recipe]
            times = mine["milliseconds"] / plain["milliseconds"]
            kept = mine["saved_gib"] / plain_gib
            saved = f"{mine['saved_gib']:.3f}"
            speeds = [*speed_cells(mine), f"{mine['kernel_tflops']:.0f}"]
            spent = f"{mine['milliseconds']:.2f}"
            table.add_row(layer, recipe, *speeds, spent, f"{times:.2f}", saved, f"{kept:.0%}")
    Console().print(table)


def speed_cells(timing: Row) -> list[str]:
    return [f"{timing['tflops']:.0f}", f"{timing['cool_tflops']:.0f}"]


def own_cells(row: Row) -> list[str]:
    ours = row["ours"]
    skewed = row["ours_zipf"]["tflops"]
    kept = skewed / ours["tflops"]
    saved = f"{ours['saved_gib']:.3f}"
    return [*speed_cells(ours), saved, f"{skewed:.0f}", f"{kept:.0%}"]


def transformers_cells(row: Row) -> list[str]:
    if "transformers" not in row:
        return [""] * 4
    ours = row["ours"]
    theirs = row["transformers"]
    ratio = theirs["milliseconds"] / ours["milliseconds"]
    saved = f"{theirs['saved_gib']:.2f}"
    return [*speed_cells(theirs), saved, f"{ratio:.2f}"]
