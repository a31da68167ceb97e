"""`moefold bench layer`: one MoE layer of known models, forward and backward, transformers' own layer beside ours.

TFLOP/s count 18 T K D F operations, the six products of the routed experts, over the time of everything from the
router's input to the layer's output and back. Saved is what the layer holds between forward and backward, its input
included. T tokens, K experts of a token, D width, F inner width, E experts.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from moefold.config.run import Config, DataConfig
from moefold.dispatch.base import Routing
from moefold.dispatch.build import build_dispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import facts_from_config
from moefold.layout.axes import single_rank_world
from moefold.model.attention.context_parallel import choose_context_mechanism
from moefold.model.block import MoeBlock
from moefold.model.parts import ModelParts
from moefold.model.token_layout import make_token_shard


@dataclass(frozen=True)
class LayerShape:
    hidden: int
    ffn: int
    experts: int
    top_k: int
    tokens: int

    @property
    def flops_per_step(self) -> float:
        return 18.0 * self.tokens * self.top_k * self.hidden * self.ffn


LAYER_SHAPES = {
    "mixtral-8x7b": LayerShape(4096, 14336, 8, 2, 8192),
    "mixtral-8x22b": LayerShape(6144, 16384, 8, 2, 8192),
    "olmoe-7b": LayerShape(2048, 1024, 64, 8, 16384),
    "qwen3-30b-a3b": LayerShape(2048, 768, 128, 8, 16384),
    "qwen3-235b": LayerShape(4096, 1536, 128, 8, 16384),
    "dsv3-32of256": LayerShape(7168, 2048, 32, 8, 4096),
}
CPU_SHAPE = LayerShape(128, 256, 8, 2, 64)  # where there is no GPU: to see that it runs

LAYER_CAPTION = (
    "TF/s: forward and backward of a whole layer, step after step. cool: the same after a pause, before the card slows "
    "down to stay within its power. GiB: held between forward and backward. Zipf: TF/s with skewed routing. kept: its "
    "share of the even figure. HF: transformers' grouped_mm layer. ratio: its time over ours, step after step."
)

LayerForward = Callable[[torch.Tensor], torch.Tensor]


class LayerTiming(NamedTuple):
    milliseconds: float
    tflops: float
    cool_tflops: float
    saved_gib: float


def moefold_layer(layer: LayerShape, device: str, dtype: torch.dtype, zipf: bool) -> tuple[LayerForward, nn.Module]:
    """Router, dispatcher, experts and combine of a block, as a run would assemble them."""
    base = Config()
    moe = replace(base.model.moe, experts=layer.experts, top_k=layer.top_k, ffn=layer.ffn)
    model = replace(base.model, layers=1, hidden=layer.hidden, moe=moe)
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    config = replace(
        base,
        model=model,
        data=replace(DataConfig(), seq_len=layer.tokens),
        train=replace(base.train, precision=name),
    )
    world = single_rank_world(device)
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    kernels = BoundKernels(facts_from_config(config, device, name, capability))
    context = choose_context_mechanism(config.parallel.context, kernels, world)
    choices = ModelParts(world, kernels, build_dispatcher(config, kernels, world), context, layer.tokens)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            moe_layer = MoeBlock(model, 0, choices).moe
    finally:
        torch.set_default_dtype(before)
    for parameter in moe_layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    share = make_token_shard(torch.empty(1, layer.tokens, device=device), world)
    skewed = zipf_expert_ids(layer, device) if zipf else None

    def routed_forward(h_TD: torch.Tensor) -> torch.Tensor:
        routing = moe_layer.router(h_TD, share)[0]
        if skewed is not None:
            routing = Routing(routing.weights_TK, skewed)
        receipt = moe_layer.dispatcher.plan(routing)
        y = moe_layer.experts(moe_layer.dispatcher.dispatch(h_TD, receipt))
        return moe_layer.dispatcher.combine(y, receipt)

    return routed_forward, moe_layer


def zipf_expert_ids(layer: LayerShape, device: str) -> torch.Tensor:
    """K distinct experts for each token, expert i drawn in proportion to 1 / i."""
    weights = 1 / torch.arange(1, layer.experts + 1, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return torch.multinomial(weights.expand(layer.tokens, -1), layer.top_k, generator=generator)


def transformers_layer(layer: LayerShape, device: str, dtype: torch.dtype) -> tuple[LayerForward, nn.Module]:
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
    return lambda h_TD: block(h_TD[None])[0], block


def measure_layer(
    made: tuple[LayerForward, nn.Module], layer: LayerShape, device: str, dtype: torch.dtype, repeat: int
) -> LayerTiming:
    forward, module = made
    generator = torch.Generator(device).manual_seed(1)
    h_TD, d_TD = (torch.randn(layer.tokens, layer.hidden, device=device, generator=generator) for _ in range(2))
    h_TD, d_TD = h_TD.to(dtype).requires_grad_(), d_TD.to(dtype)

    def forward_backward() -> None:
        h_TD.grad = None
        module.zero_grad(set_to_none=True)
        forward(h_TD).backward(d_TD)

    for _ in range(3):
        forward_backward()
    before = allocated_bytes(device)
    out_TD = forward(h_TD)
    saved = allocated_bytes(device) - before + tensor_bytes(h_TD) - tensor_bytes(out_TD)
    del out_TD
    cool = median(cool_milliseconds(forward_backward, device) for _ in range(repeat))
    milliseconds = median(sustained_milliseconds(forward_backward, device, repeat))
    return LayerTiming(
        milliseconds, layer.flops_per_step / milliseconds / 1e9, layer.flops_per_step / cool / 1e9, saved / 2**30
    )


def tensor_bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def allocated_bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def sustained_milliseconds(step: Callable[[], Any], device: str, repeat: int, steps: int = 10) -> list[float]:
    """Milliseconds of one step, of a few in a row, so many times. All follow each other without a wait, as in training:
    the host runs ahead of the device, by the steps before the first mark too, and the card is as warm as it gets."""
    if device != "cuda":
        return [wall_clock_seconds(step) * 1e3 for _ in range(repeat)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    for mark in marks:
        for _ in range(steps):
            step()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / steps for begin, end in pairwise(marks)]


def cool_milliseconds(step: Callable[[], Any], device: str) -> float:
    """Milliseconds of one step, the mean of two after a pause and two more: before the card lowers its clock to stay
    within its power. Short benchmarks see this, training does not."""
    if device != "cuda":
        return wall_clock_seconds(step) * 1e3
    torch.cuda.synchronize()
    sleep(0.2)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for mark in (begin, end):
        step()
        step()
        mark.record()
    end.synchronize()
    return begin.elapsed_time(end) / 2


def wall_clock_seconds(step: Callable[[], Any]) -> float:
    begun = perf_counter()
    step()
    return perf_counter() - begun


def layer_report(names: list[str], device: str, dtype: torch.dtype, repeat: int) -> dict[str, Any]:
    """Every layer in turn: ours, ours with skewed routing, transformers'."""
    layers = {name: LAYER_SHAPES[name] for name in names} if device == "cuda" else {"small": CPU_SHAPE}
    results: list[dict[str, Any]] = []
    for name, layer in layers.items():
        row: dict[str, Any] = {"layer": name, **asdict(layer)}
        contenders: dict[str, Callable[[], tuple[LayerForward, nn.Module]]] = {
            "ours": lambda layer=layer: moefold_layer(layer, device, dtype, zipf=False),
            "ours_zipf": lambda layer=layer: moefold_layer(layer, device, dtype, zipf=True),
        }
        if installed_version("transformers") is not None:
            contenders["transformers"] = lambda layer=layer: transformers_layer(layer, device, dtype)
        for who, make in contenders.items():
            row[who] = measure_layer(make(), layer, device, dtype, repeat)._asdict()
            if device == "cuda":
                torch.cuda.empty_cache()
        results.append(row)
    return {**machine_facts(device), "results": results}


def machine_facts(device: str) -> dict[str, Any]:
    card = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    versions = {name: installed_version(name) for name in ("torch", "triton", "transformers")}
    return {"date": date.today().isoformat(), "card": card, "versions": versions}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report_heading(report: dict[str, Any]) -> str:
    """What was measured on, when, and with which versions."""
    names = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    return f"{report['card']}, {report['date']}, {names}"


def print_layer_report(report: dict[str, Any]) -> None:
    table = Table(
        title=report_heading(report),
        title_justify="left",
        caption=LAYER_CAPTION,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer", no_wrap=True)
    for column in ("TF/s", "cool", "GiB", "Zipf", "kept", "HF", "cool", "GiB", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["results"]:
        mine, skewed, other = row["ours"], row["ours_zipf"], row.get("transformers")
        beside = ("",) * 4
        if other:
            beside = (
                f"{other['tflops']:.0f}",
                f"{other['cool_tflops']:.0f}",
                f"{other['saved_gib']:.2f}",
                f"{other['milliseconds'] / mine['milliseconds']:.2f}",
            )
        share = f"{skewed['tflops'] / mine['tflops']:.0%}"
        figures = (f"{mine['tflops']:.0f}", f"{mine['cool_tflops']:.0f}", f"{mine['saved_gib']:.3f}")
        table.add_row(row["layer"], *figures, f"{skewed['tflops']:.0f}", share, *beside)
    Console().print(table)
