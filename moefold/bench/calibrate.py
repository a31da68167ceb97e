"""`moefold bench calibrate`: times products, attention, pointwise passes, copies and launches on the machine at hand.
It writes what the planner wants to know of it, a YAML file for `moefold plan --gpu FILE`.

Products and grouped products have the shapes of known models; attention is timed over lengths and widths of heads. The
curves that `plan/machine/efficiency_fit.py` lays through these points go into the file, and the points beside them.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import yaml
from rich.console import Console

from moefold.config.errors import UserError
from moefold.plan.machine.efficiency_fit import TimedKernel, fit_efficiencies
from moefold.plan.machine.gpu import PEAK_BY_PRECISION, find_gpu_by_name, known_gpu_names
from moefold.presets.command_options import read_options

if TYPE_CHECKING:
    import torch

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
GROUPED_GEMM_SHAPES = [  # groups, rows of each, n, k: experts of known models
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
ATTENTION_SHAPES = [(16_384, 128), (4096, 128), (1024, 128), (4096, 64), (16_384, 64)]  # length, width of heads
STREAM_SHAPES = [(16_384, 7168), (131_072, 2048)]  # rows, width


@dataclass(frozen=True)
class CalibrateOptions:
    """Measure this machine for the planner and write a file for `moefold plan --gpu FILE`."""

    out: Path = Path("machine.yaml")
    """Where to write it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    like: str | None = None
    """The GPU whose peaks and links to take over; by default the one of this name, or h100."""
    scale: int = 1
    """Divide all sizes by this, for a quick look."""
    repeat: int = 7
    """Timed repetitions; the median counts."""


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(CalibrateOptions, argv, "bench calibrate", config_keys=False)
    if options.repeat < 1 or options.scale < 1:
        raise UserError("--repeat and --scale must be at least 1; such as 7 and 1")
    if not options.out.parent.is_dir():
        raise UserError(f"no folder {options.out.parent} to write {options.out.name} into; make it, or choose another")

    import torch  # only now: refusals above appear at once

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device here; expected cpu or auto")
    tree = MachineCalibration(device, options).machine_description()
    options.out.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    Console().print(f"wrote {options.out}: {tree['kernels']}", highlight=False, markup=False, soft_wrap=True)
    return 0


def peaks_as_measured(points: list[TimedKernel]) -> dict[str, Any]:
    """A machine without a data sheet: its peaks are the best that was seen, and it has no neighbours."""
    hbm = max(t.bytes / t.seconds for t in points if t.what == "stream")
    best = max(t.flops / t.seconds for t in points)
    return {"peak": {"bf16": best}, "hbm": hbm, "domain": 1, "inside": hbm, "network": 1e9, "dollars": 0.0}


class MachineCalibration:
    """One machine under the clock."""

    def __init__(self, device: str, options: CalibrateOptions):
        import torch

        self.device, self.options = device, options
        self.scale = options.scale if device == "cuda" else max(options.scale, 16)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.wide = 2 if device == "cuda" else 4

    def machine_description(self) -> dict[str, Any]:
        """The whole file."""
        name = self.gpu_name()
        base = self.options.like or (name.lower() if name.lower() in known_gpu_names() else "h100")
        like = find_gpu_by_name(base)
        points = [*self.time_gemms(), *self.time_grouped_gemms(), *self.time_attention(), *self.time_streams()]
        points += [*self.time_fp8_gemms()] if self.device == "cuda" else []
        launch, start, sync = self.time_launches()
        known = asdict(like) if self.device == "cuda" else peaks_as_measured(points)
        peaks = {p: known["peak"][of] for p, of in PEAK_BY_PRECISION.items() if of in known["peak"]}
        return {
            **known,
            "name": name,
            "capability": self.cuda_capability(),
            "memory": round(self.memory_gib(), 1),
            "host_link": self.host_link_bandwidth(like.host_link),
            "host": {"launch": launch, "sync": sync},
            "kernels": fit_efficiencies(points, peaks, known["hbm"], start),
            "origin": f"measured {datetime.date.today()} on {self.machine_title()}",
            "points": [{k: v for k, v in asdict(t).items() if v} for t in points],
        }

    def gpu_name(self) -> str:
        import torch

        if self.device == "cpu":
            return "CPU"
        full = torch.cuda.get_device_name()
        return next(
            (gpu.upper() for gpu in sorted(known_gpu_names(), key=len, reverse=True) if gpu.upper() in full), full
        )

    def cuda_capability(self) -> int:
        import torch

        major, minor = torch.cuda.get_device_capability() if self.device == "cuda" else (0, 0)
        return 10 * major + minor

    def machine_title(self) -> str:
        import torch

        return f"{torch.cuda.get_device_name() if self.device == 'cuda' else 'a CPU'}, torch {torch.__version__}"

    def memory_gib(self) -> float:
        import torch

        if self.device == "cuda":
            return torch.cuda.get_device_properties(0).total_memory / 2**30
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30

    def wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def clock(self, work: Callable[[], Any]) -> float:
        """Median seconds of the device, each over enough calls to be seen."""
        import torch

        for _ in range(3):
            work()
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        calls = max(1, min(20, int(2e-3 / max(1e-6, time.perf_counter() - begun))))
        times: list[float] = []
        for _ in range(self.options.repeat):
            if self.device == "cuda":
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                first.record()
                for _ in range(calls):
                    work()
                last.record()
                self.wait()
                times.append(first.elapsed_time(last) / 1e3 / calls)
            else:
                begun = time.perf_counter()
                for _ in range(calls):
                    work()
                times.append((time.perf_counter() - begun) / calls)
        return median(times)

    def scaled_sizes(self, *sizes: int) -> list[int]:
        """Sizes scaled down, still multiples of 16."""
        return [max(16, size // self.scale // 16 * 16) for size in sizes]

    def normal(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def time_gemms(self) -> Iterator[TimedKernel]:
        for shape in GEMM_SHAPES:
            rows, n, k = self.scaled_sizes(*shape)
            x, w = self.normal(rows, k), self.normal(n, k)
            size = self.wide * (rows * k + n * k + rows * n)
            yield TimedKernel("gemm", self.clock(lambda x=x, w=w: x @ w.mT), 2.0 * rows * n * k, size, rows=rows)

    def time_fp8_gemms(self) -> Iterator[TimedKernel]:
        """Products in fp8, scaled by tensor and by block, where this GPU and this torch have them."""
        import torch

        for shape in GEMM_SHAPES:
            rows, n, k = self.scaled_sizes(*shape)
            x = self.normal(rows, k).to(torch.float8_e4m3fn)
            w = self.normal(n, k).to(torch.float8_e4m3fn)
            one = torch.ones((), device=self.device)
            blocks = (
                torch.ones(k // 128, rows, device=self.device).T,
                torch.ones(k // 128, n // 128, device=self.device).T,
            )
            size = rows * k + n * k + 2.0 * rows * n
            for precision, scales in (("fp8", (one, one)), ("fp8-blockwise", blocks)):
                try:
                    seconds = self.clock(
                        lambda x=x, w=w, s=scales: torch._scaled_mm(x, w.mT, *s, out_dtype=torch.bfloat16)
                    )
                except (RuntimeError, ValueError):
                    continue  # this pair of shapes and scales has no kernel here
                yield TimedKernel("gemm", seconds, 2.0 * rows * n * k, size, precision, rows=rows)

    def time_grouped_gemms(self) -> Iterator[TimedKernel]:
        import torch
        import torch.nn.functional as F

        for groups, *shape in GROUPED_GEMM_SHAPES:
            rows, n, k = self.scaled_sizes(*shape)
            x, w = self.normal(groups * rows, k), self.normal(groups, n, k)
            offsets = torch.arange(1, groups + 1, device=self.device, dtype=torch.int32) * rows
            size = self.wide * groups * (rows * k + n * k + rows * n)
            work = lambda x=x, w=w, o=offsets: F.grouped_mm(x, w.mT, offs=o)  # noqa: E731
            yield TimedKernel("grouped", self.clock(work), 2.0 * groups * rows * n * k, size, rows=rows)

    def time_attention(self) -> Iterator[TimedKernel]:
        import torch
        import torch.nn.functional as F

        for length, width in ATTENTION_SHAPES:
            (length,) = self.scaled_sizes(length)
            heads = max(1, 32 * 4096 // length // self.scale)
            q, k, v = (self.normal(1, heads, length, width).requires_grad_() for _ in range(3))
            flops = 2.0 * 2 * heads * length * length / 2 * width  # two products, half of the scores
            with torch.no_grad():
                forward = self.clock(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradient = torch.randn_like(out)
            work = lambda o=out, g=gradient, i=(q, k, v): torch.autograd.grad(o, i, g, retain_graph=True)  # noqa: E731
            yield TimedKernel("attention_forward", forward, flops, length=length, width=width)
            yield TimedKernel("attention_backward", self.clock(work), 2.5 * flops, length=length, width=width)

    def time_streams(self) -> Iterator[TimedKernel]:
        """A copy, a gather of rows, a norm, an activation, and a cast to half the width: bytes read and written."""
        import torch
        import torch.nn.functional as F

        low = torch.float8_e4m3fn if self.device == "cuda" else torch.bfloat16
        for shape in STREAM_SHAPES:
            rows, width = self.scaled_sizes(*shape)
            x, weight = self.normal(rows, width), self.normal(width)
            index = torch.randperm(rows, device=self.device)
            size = self.wide * rows * width
            works: list[tuple[Callable[[], Any], float]] = [
                (lambda x=x: x.clone(), 2.0),
                (lambda x=x, i=index: x[i], 2.0),
                (lambda x=x, w=weight: F.rms_norm(x, w.shape, w), 2.0),
                (lambda x=x: torch.add(x, x), 2.0),
                (lambda x=x: x.to(low), 1.5),
            ]
            for work, passes in works:
                yield TimedKernel("stream", self.clock(work), bytes=passes * size)

    def time_launches(self) -> tuple[float, float, float]:
        """Seconds a launch takes from Python, seconds between kernels that are queued, and seconds of one wait."""
        import torch

        x = torch.ones(16, device=self.device)
        count = 500
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            x.add_(1)
        launch = (time.perf_counter() - begun) / count
        self.wait()
        sync = median(self.wall_clock_seconds(lambda: x.add_(1).sum().item()) for _ in range(50))
        if self.device == "cpu":
            return launch, launch, sync
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                x.add_(1)
        return launch, self.clock(graph.replay) / count, sync

    def wall_clock_seconds(self, work: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    def host_link_bandwidth(self, otherwise: float) -> float:
        import torch

        if self.device == "cpu":
            return otherwise
        pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(pinned, device="cuda")
        return round(pinned.numel() / self.clock(lambda: there.copy_(pinned, non_blocking=True)), -8)
