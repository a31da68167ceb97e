"""One step of a run, watched: time by step and lane, the rate of each class of product, memory by region, launch gaps.

The step that is watched is an ordinary one. Marks are put around the steps of the model and the phases behind backward,
and taken off again; what autograd keeps between forward and backward is counted where it is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from moefold.anatomy.step_specs import StepSpec, prefixed_model_steps, prefixed_mtp_steps
from moefold.comm.collectives import all_gather_objects
from moefold.config.run import Config
from moefold.model.steps import Carry, Region, Step
from moefold.observe.profile import StepProfile, profile_device, profiler_mark
from moefold.observe.trace import write_trace
from moefold.train.assemble import Run

T = TypeVar("T")
GIB = 2**30


@dataclass
class StepMemory:
    """Bytes: what the run holds, what one microbatch keeps for its backward by step and region, and the most that was
    held at once (0 where torch does not count)."""

    resident: dict[str, int] = field(default_factory=dict[str, int])
    saved: dict[str, int] = field(default_factory=dict[str, int])
    peak: int = 0


@dataclass
class WatchedStep:
    profile: StepProfile
    memory: StepMemory
    products: list[tuple[str, float, float]]  # class of products, FLOPs, seconds


def profile_step(run: Run, take: Callable[[], T]) -> tuple[T, WatchedStep]:
    """Take a step and see where its time and memory went."""
    keeper = SavedTensorCounter(run)
    with profile_device(run.world.device) as profiled, keeper.counting_saved(), phase_marks(run, keeper):
        if run.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run.executor.spans.start_recording()
        report = take()
    run.executor.spans.recording = False
    profile = profiled()
    memory = StepMemory(resident_bytes(run), keeper.saved)
    if run.world.device.type == "cuda":
        memory.peak = torch.cuda.max_memory_allocated()
    return report, WatchedStep(profile, memory, product_rates(run.config, profile, run.world.size))


@contextmanager
def phase_marks(run: Run, keeper: SavedTensorCounter) -> Iterator[None]:
    """Around every step of the model, and around every phase of train_step but forward and backward themselves."""
    phases = [
        (run.gradients, "begin", "begin"),
        (run.gradients, "finish", "sum gradients"),
        (run.gradients, "norm", "norm"),
        (run.optimizer, "step", "update"),
        (run.parameters, "publish", "publish"),
        (run.model, "balance", "balance"),
    ]
    with ExitStack() as undo:
        for owner, method, name in phases:
            setattr(owner, method, wrap_in_mark(name, getattr(owner, method)))
            undo.callback(delattr, owner, method)
        run.executor.watch = lambda steps: keeper.watch([mark_model_step(step, keeper) for step in steps])
        undo.callback(delattr, run.executor, "watch")
        yield


def wrap_in_mark(name: str, work: Callable[..., T]) -> Callable[..., T]:
    def call_in_mark(*args: Any, **more: Any) -> T:
        with profiler_mark(name):
            return work(*args, **more)

    return call_in_mark


def mark_model_step(step: Step, keeper: SavedTensorCounter) -> Step:
    def run_in_mark(carry: Carry) -> Carry:
        with profiler_mark(step.spec.name, "forward"), keeper.inside(step.spec.name):
            return step.run(carry)

    return replace(step, run=run_in_mark)


class SavedTensorCounter:
    """Counts what the first microbatch keeps for its backward, by the step and region that saved it first."""

    def __init__(self, run: Run):
        self.saved: dict[str, int] = {}
        self.where: list[str] = []
        self.passages = 0
        self.seen = {storage_address(p) for p in run.model.parameters()}
        self.regions = [(n.rsplit(".", 1)[-1], m) for n, m in run.model.named_modules() if isinstance(m, Region)]

    def watch(self, steps: list[Step]) -> list[Step]:
        self.passages += 1
        return steps

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.where.append(name)
        try:
            yield
        finally:
            self.where.pop()

    @contextmanager
    def counting_saved(self) -> Iterator[None]:
        hooks = [hook for name, region in self.regions for hook in self.around(name, region)]
        with torch.autograd.graph.saved_tensors_hooks(self.count, lambda x: x):
            yield
        for hook in hooks:
            hook.remove()

    def around(self, name: str, region: Region) -> Sequence[Any]:
        return (
            region.register_forward_pre_hook(lambda *_: self.where.append(name)),
            region.register_forward_hook(lambda *_: self.where.remove(name)),
        )

    def count(self, x: torch.Tensor) -> torch.Tensor:
        if self.where and self.passages <= 1 and (storage := storage_address(x)) not in self.seen:
            self.seen.add(storage)
            place = " ".join(self.where)
            self.saved[place] = self.saved.get(place, 0) + x.untyped_storage().nbytes()
        return x


def storage_address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def resident_bytes(run: Run) -> dict[str, int]:
    """Weights, optimizer state, and gradients, which are made as backward reaches them."""
    buckets, state = run.gradients.buckets, run.optimizer.bytes()
    main = state.pop("main")
    return {
        "weights": sum(bucket.weights.nbytes for bucket in buckets),
        "main weights": main,
        "moments": sum(state.values()),
        "gradients": sum(bucket.sums.nbytes for bucket in buckets),
    }


def product_rates(config: Config, profile: StepProfile, ranks: int) -> list[tuple[str, float, float]]:
    """Each class of products with the FLOPs of its forward and backward (twice the forward) on one rank, and the time
    its kernels took. Those of attention with the context are a class of their own."""
    tokens = config.train.global_batch * config.data.seq_len / ranks
    flops: dict[tuple[str, str], float] = {}
    for _, step in (*prefixed_model_steps(config.model), *prefixed_mtp_steps(config.model)):
        for kind, each in step_flops_by_kind(step, config.data.seq_len):
            flops[step.name, kind] = flops.get((step.name, kind), 0.0) + 3 * each * tokens
    found = [(name, kind, total, profile.seconds_of_kind(name, kind)) for (name, kind), total in flops.items() if total]
    return [(f"{name} core" if kind == "attention" else name, total, s) for name, kind, total, s in found if s]


def step_flops_by_kind(step: StepSpec, seq_len: int) -> list[tuple[str, float]]:
    return [("gemm", 2 * step.matmul), ("attention", 2 * step.context * step.seen(seq_len))]


def write_profile_trace(run: Run, watched: WatchedStep) -> None:
    """What every rank did, into one trace, from the first event on."""
    own = [*watched.profile.events(run.world.rank), *run.executor.spans.events]
    every = [event for events in all_gather_objects(own, run.world.everyone) for event in events]
    if run.world.rank == 0:
        begun = min(event.start for event in every)
        shifted = [replace(event, start=event.start - begun, end=event.end - begun) for event in every]
        write_trace(run.out / "trace.json", shifted)


def profile_text(run: Run, watched: WatchedStep) -> str:
    """All there is to see, for people."""
    profile = watched.profile
    console = Console(width=100, record=True, file=StringIO())
    console.print(
        f"step {run.step}, watched: {profile.seconds * 1e3:.1f} ms, of which {profile.busy_seconds * 1e3:.1f} ms "
        f"something ran on {profile.device}"
    )
    for table in (step_time_table(run, profile), product_rate_table(watched), memory_table(watched.memory)):
        console.print(table)
    if profile.device == "cuda":
        console.print("\n".join(launch_gap_lines(profile)))
    return console.export_text().rstrip()


def step_time_table(run: Run, profile: StepProfile) -> Table:
    lanes = {
        step.name: step.lane
        for _, step in (*prefixed_model_steps(run.config.model), *prefixed_mtp_steps(run.config.model))
    }
    times = profile.seconds_by_phase()
    names = list(dict.fromkeys(place.name for place in times))
    order = [*lanes, *(name for name in names if name not in lanes)]
    table = Table("step", "lane", title="time, ms", title_justify="left")
    for column in ("forward", "backward", "otherwise", "share"):
        table.add_column(column, justify="right")
    total = sum(times.values())
    for name in (name for name in order if name in names):
        by = {place.direction: seconds for place, seconds in times.items() if place.name == name}
        cells = [f"{by[d] * 1e3:.2f}" if d in by else "" for d in ("forward", "backward", "")]
        table.add_row(name, lanes.get(name, ""), *cells, f"{sum(by.values()) / total:.1%}")
    return table


def product_rate_table(watched: WatchedStep) -> Table:
    table = Table("products", title="rate of each class of products", title_justify="left")
    for column in ("TFLOP", "ms", "TFLOP/s"):
        table.add_column(column, justify="right")
    for name, flops, seconds in watched.products:
        table.add_row(name, f"{flops / 1e12:.3g}", f"{seconds * 1e3:.2f}", f"{flops / seconds / 1e12:.3g}")
    return table


def memory_table(memory: StepMemory) -> Table:
    table = Table("memory", title="memory, GiB", title_justify="left")
    table.add_column("held", justify="right")
    for name, size in memory.resident.items():
        table.add_row(name, f"{size / GIB:.3f}")
    table.add_section()
    for name, size in sorted(memory.saved.items(), key=lambda item: -item[1]):
        table.add_row(f"saved in {name}", f"{size / GIB:.3f}")
    if memory.peak:
        table.add_section()
        table.add_row("peak", f"{memory.peak / GIB:.3f}")
    return table


def launch_gap_lines(profile: StepProfile) -> list[str]:
    gaps = profile.gaps()
    idle = sum(gap.seconds for gap in gaps)
    long = [gap for gap in gaps if gap.seconds > 20e-6]
    lead = sorted(work.start - work.launched for work in profile.kernels_run)
    ahead = lead[len(lead) // 2] * 1e3 if lead else 0.0
    lines = [
        f"launch gaps: {idle * 1e3:.2f} ms in all, {len(long)} of more than 20 us; "
        f"{len(profile.kernels_run)} works, the host {ahead:.1f} ms ahead of the device (median)"
    ]
    return lines + [f"  {g.seconds * 1e6:.0f} us before {g.before.name} {g.before.direction}" for g in long[:5]]
