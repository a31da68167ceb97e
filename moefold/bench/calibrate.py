"""`moefold bench calibrate`: timings of GEMMs, attention, pointwise passes, copies and launches on this machine.

The result is a YAML file for `moefold plan --gpu FILE`. GEMMs and grouped GEMMs have the shapes of known models;
attention is timed over sequence lengths and head widths. The file holds the efficiency curves that
`plan/machine/efficiency_fit.py` fits to the timings, and the timings.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from rich.console import Console
from torch import Tensor

from moefold.bench.clock import Work, wall_clock_seconds
from moefold.bench.machine import GIB, cuda_capability, resolve_device, synchronize_device
from moefold.bench.options import CalibrateOptions
from moefold.plan.machine.efficiency_fit import TimedKernel, fit_efficiencies
from moefold.plan.machine.gpu import PEAK_BY_PRECISION, find_gpu_by_name, known_gpu_names, match_gpu_name

GEMM_SHAPES = [  # rows, n, k: projections of attention, dense MLPs, heads
    (8192, 8192, 8192),
    (4096, 24_576, 1536),
    (4096, 7168, 16_384),
    (4096, 1536, 7168),
    (4096, 576, 7168),
    (16_384, 5120, 2048),
    (16_384, 2048, 4096),
    (2048, 4096, 4096),
    (16_384, 36_864, 4096),
]
GROUPED_GEMM_SHAPES = [  # experts, rows of each, n, k: experts of known models
    (8, 2048, 28_672, 4096),
    (8, 2048, 4096, 14_336),
    (64, 2048, 2048, 2048),
    (64, 2048, 2048, 1024),
    (128, 1024, 1536, 2048),
    (128, 1024, 2048, 768),
    (32, 1024, 4096, 7168),
    (32, 1024, 7168, 2048),
    (16, 512, 3072, 4096),
]
ATTENTION_SHAPES = [  # sequence length, head width
    (16_384, 128),
    (4096, 128),
    (1024, 128),
    (4096, 64),
    (16_384, 64),
]
STREAM_SHAPES = [(16_384, 7168), (131_072, 2048)]  # rows, columns


ScalePair = tuple[Tensor, Tensor]  # of the input and of the weight
LAUNCH_COUNT = 500
SYNC_COUNT = 50
LEAST_SCALE_ON_CPU = 16
HOST_COPY_BYTES = 1 << 28


def run_benchmark(options: CalibrateOptions) -> int:
    device = resolve_device(options.device)
    calibration = MachineCalibration(device, options)
    description = calibration.machine_description()
    text = yaml.safe_dump(description, sort_keys=False)
    options.out.write_text(text, encoding="utf-8")
    message = f"wrote {options.out}: {description['kernels']}"
    console = Console(soft_wrap=True, highlight=False)
    console.print(message, markup=False)
    return 0


def peaks_as_measured(points: list[TimedKernel]) -> dict[str, Any]:
    """A machine without a data sheet: its peaks are the best measured rates, and it has no neighbours."""
    streams = [point for point in points if point.what == "stream"]
    hbm = max(point.bytes / point.seconds for point in streams)
    peak = max(point.flops / point.seconds for point in points)
    return {
        "peak": {"bf16": peak},
        "hbm": hbm,
        "domain": 1,
        "inside": hbm,
        "network": 1e9,
        "dollars": 0.0,
    }


def peaks_by_precision(known: dict[str, float]) -> dict[str, float]:
    """Peak FLOP/s of each precision that the machine has."""
    peaks: dict[str, float] = {}
    for precision, number_format in PEAK_BY_PRECISION.items():
        if number_format in known:
            peaks[precision] = known[number_format]
    return peaks


class MachineCalibration:
    """The timings of one machine, and the planner's description of it."""

    def __init__(self, device: str, options: CalibrateOptions):
        self.device = device
        self.options = options
        self.scale = options.scale
        self.dtype = torch.bfloat16
        self.on_gpu = device == "cuda"
        if not self.on_gpu:
            self.scale = max(options.scale, LEAST_SCALE_ON_CPU)
            self.dtype = torch.float32

    def machine_description(self) -> dict[str, Any]:
        """The content of the YAML file."""
        name = self.gpu_name()
        similar_name = self.similar_gpu_name(name)
        similar = find_gpu_by_name(similar_name)
        points = self.time_every_kernel()
        launch, start, sync = self.time_launches()
        known = asdict(similar) if self.on_gpu else peaks_as_measured(points)
        hbm = known["hbm"]
        peaks = peaks_by_precision(known["peak"])
        efficiencies = fit_efficiencies(points, peaks, hbm, start)
        major, minor = cuda_capability(self.device)
        return {
            **known,
            "name": name,
            "capability": 10 * major + minor,
            "memory": round(self.memory_gib(), 1),
            "host_link": self.host_link_bandwidth(similar.host_link),
            "host": {"launch": launch, "sync": sync},
            "kernels": efficiencies,
            "origin": f"measured {datetime.date.today()} on {self.machine_title()}",
            "points": [nonzero_fields(point) for point in points],
        }

    def time_every_kernel(self) -> list[TimedKernel]:
        points = list(self.time_gemms())
        points += self.time_grouped_gemms()
        points += self.time_attention()
        points += self.time_streams()
        if self.on_gpu:
            points += self.time_fp8_gemms()
        return points

    def gpu_name(self) -> str:
        """The planner's name of this GPU, or torch's where the planner has none."""
        if not self.on_gpu:
            return "CPU"
        full_name = torch.cuda.get_device_name()
        known = match_gpu_name(full_name)
        return known.upper() if known else full_name

    def similar_gpu_name(self, name: str) -> str:
        if self.options.like:
            return self.options.like
        known = name.lower()
        return known if known in known_gpu_names() else "h100"

    def machine_title(self) -> str:
        title = "a CPU"
        if self.on_gpu:
            title = torch.cuda.get_device_name()
        return f"{title}, torch {torch.__version__}"

    def memory_gib(self) -> float:
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(0)
            return properties.total_memory / GIB
        pages = os.sysconf("SC_PHYS_PAGES")
        page = os.sysconf("SC_PAGE_SIZE")
        return pages * page / GIB

    def wait(self) -> None:
        synchronize_device(self.device)

    def clock(self, work: Work) -> float:
        """Median seconds of a call on the device, each measured over enough calls to be resolved by the clock."""

        def call_and_wait() -> None:
            work()
            self.wait()

        def call_many() -> None:
            for _ in range(count):
                work()

        # Warm up, then estimate one call, to choose how many calls fill about 2 ms.
        for _ in range(3):
            call_and_wait()
        estimate = wall_clock_seconds(call_and_wait)
        of_call = max(1e-6, estimate)
        wanted = int(2e-3 / of_call)
        count = max(1, min(20, wanted))
        measure = event_seconds if self.on_gpu else wall_clock_seconds
        repeats = range(self.options.repeat)
        times = [measure(call_many) for _ in repeats]
        return median(times) / count

    def scaled_sizes(self, *sizes: int) -> list[int]:
        """Sizes scaled down, still multiples of 16."""
        scaled: list[int] = []
        for size in sizes:
            smaller = size // self.scale // 16 * 16
            scaled.append(max(16, smaller))
        return scaled

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def time_gemms(self) -> Iterator[TimedKernel]:
        for shape in GEMM_SHAPES:
            rows, n, k = self.scaled_sizes(*shape)
            x = self.normal(rows, k)
            w = self.normal(n, k)
            multiply = partial(torch.matmul, x, w.mT)
            seconds = self.clock(multiply)
            flops = 2.0 * rows * n * k
            size = self.gemm_bytes(rows, n, k)
            yield TimedKernel("gemm", seconds, flops, size, rows=rows)

    def gemm_bytes(self, rows: int, n: int, k: int) -> int:
        """Bytes of both operands and of the result."""
        operands = (rows + n) * k
        result = rows * n
        return self.dtype.itemsize * (operands + result)

    def time_fp8_gemms(self) -> Iterator[TimedKernel]:
        """GEMMs in fp8, scaled by tensor and by block, where this GPU and this torch have them."""
        for shape in GEMM_SHAPES:
            rows, n, k = self.scaled_sizes(*shape)
            x = self.normal(rows, k)
            w = self.normal(n, k)
            x_fp8 = x.to(torch.float8_e4m3fn)
            w_fp8 = w.to(torch.float8_e4m3fn)
            into_bf16 = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
            flops = 2.0 * rows * n * k
            operands = (rows + n) * k
            result = 2.0 * rows * n  # in bf16
            size = operands + result
            scalings = self.fp8_scales(rows, n, k)
            for precision, (scale_a, scale_b) in scalings.items():
                multiply = partial(into_bf16, x_fp8, w_fp8.mT, scale_a, scale_b)
                try:
                    seconds = self.clock(multiply)
                except (RuntimeError, ValueError):
                    continue  # no kernel here for these shapes and scales
                yield TimedKernel("gemm", seconds, flops, size, precision, rows=rows)

    def fp8_scales(self, rows: int, n: int, k: int) -> dict[str, ScalePair]:
        """Scales of both operands: one a tensor, or 1 x 128 and 128 x 128 blocks."""
        ones = partial(torch.ones, device=self.device)
        one = ones(())
        input_blocks = ones(k // 128, rows)
        weight_blocks = ones(k // 128, n // 128)
        blocks = (input_blocks.T, weight_blocks.T)
        return {"fp8": (one, one), "fp8-blockwise": blocks}

    def time_grouped_gemms(self) -> Iterator[TimedKernel]:
        for groups, *shape in GROUPED_GEMM_SHAPES:
            rows, n, k = self.scaled_sizes(*shape)
            x = self.normal(groups * rows, k)
            w = self.normal(groups, n, k)
            numbers = torch.arange(1, groups + 1, dtype=torch.int32)
            ends = rows * numbers.to(self.device)
            multiply = partial(F.grouped_mm, x, w.mT, offs=ends)
            seconds = self.clock(multiply)
            size = groups * self.gemm_bytes(rows, n, k)
            flops = 2.0 * groups * rows * n * k
            yield TimedKernel("grouped", seconds, flops, size, rows=rows)

    def time_attention(self) -> Iterator[TimedKernel]:
        for full_length, width in ATTENTION_SHAPES:
            (length,) = self.scaled_sizes(full_length)
            heads = 32 * 4096 // length // self.scale
            heads = max(1, heads)
            shape = (1, heads, length, width)
            qkv: list[Tensor] = []
            for _ in range(3):
                x = self.normal(*shape)
                qkv.append(x.requires_grad_())
            attend = partial(F.scaled_dot_product_attention, *qkv, is_causal=True)
            with torch.no_grad():
                forward = self.clock(attend)
            # The backward pass alone, over one saved forward pass.
            out = attend()
            gradient = torch.randn_like(out)
            differentiate = partial(torch.autograd.grad, out, qkv, gradient, retain_graph=True)
            backward = self.clock(differentiate)
            flops = 2.0 * 2 * heads * length * length / 2 * width  # two products, half of the scores
            timed = partial(TimedKernel, length=length, width=width)
            yield timed("attention_forward", forward, flops)
            yield timed("attention_backward", backward, 2.5 * flops)

    def time_streams(self) -> Iterator[TimedKernel]:
        """Passes bounded by memory: copy, gather of rows, norm, sum, cast to half the width."""
        half_width = torch.float8_e4m3fn if self.on_gpu else torch.bfloat16
        for shape in STREAM_SHAPES:
            rows, width = self.scaled_sizes(*shape)
            x = self.normal(rows, width)
            weight = self.normal(width)
            index = torch.randperm(rows, device=self.device)
            size = x.nbytes
            norm = partial(F.rms_norm, x, weight.shape, weight)
            # Each pass with its bytes read and written, in units of `size`.
            passes: list[tuple[Work, float]] = [
                (x.clone, 2.0),
                (partial(x.__getitem__, index), 2.0),
                (norm, 2.0),
                (partial(x.add, x), 2.0),
                (partial(x.to, half_width), 1.5),
            ]
            for work, traffic in passes:
                seconds = self.clock(work)
                yield TimedKernel("stream", seconds, bytes=traffic * size)

    def time_launches(self) -> tuple[float, float, float]:
        """Seconds of a launch from Python, seconds between queued kernels, and seconds of one synchronization."""
        x = torch.ones(16, device=self.device)

        def launch_many() -> None:
            for _ in range(LAUNCH_COUNT):
                x.add_(1)

        def launch_and_wait() -> None:
            x.add_(1)
            x.sum().item()

        self.wait()
        launch = wall_clock_seconds(launch_many) / LAUNCH_COUNT
        self.wait()
        syncs = [wall_clock_seconds(launch_and_wait) for _ in range(SYNC_COUNT)]
        sync = median(syncs)
        if not self.on_gpu:
            return launch, launch, sync
        # A graph replays the same launches without Python: what is left is the gap between queued kernels.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_many()
        start = self.clock(graph.replay) / LAUNCH_COUNT
        return launch, start, sync

    def host_link_bandwidth(self, fallback: float) -> float:
        if not self.on_gpu:
            return fallback
        pinned = torch.empty(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty_like(pinned, device="cuda")
        copy = partial(on_device.copy_, pinned, non_blocking=True)
        seconds = self.clock(copy)
        return round(pinned.nbytes / seconds, -8)


def nonzero_fields(point: TimedKernel) -> dict[str, Any]:
    fields = asdict(point)
    return {name: value for name, value in fields.items() if value}


def event_seconds(work: Work) -> float:
    """Seconds of a call on the device, between two events of its stream."""
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
