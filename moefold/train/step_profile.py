"""Profile of one training step: time by step and lane, rate of each class of products, memory by region, launch gaps.

The profiled step is an ordinary one. Observers of the executor (`Around` in model/steps.py) mark the steps of the model
for torch's profiler and count what autograd saves between forward and backward; `run.phase` marks the rest of the step.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain
from statistics import median_high
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moefold.anatomy.step_specs import StepSpec, prefixed_steps
from moefold.comm.host_objects import gather_objects
from moefold.config.run import Config, ModelConfig
from moefold.model.steps import PassKey, PassKind, Region, Step
from moefold.observe.profile import IN_BACKGROUND, StepPhase, StepProfile, profile_device, profiler_mark
from moefold.observe.trace import write_trace
from moefold.train.assemble import Run

T = TypeVar("T")
GIB = 2**30
LONG_GAP = 20e-6  # seconds
DIRECTIONS = ("forward", "backward", "")
ByteCounts = dict[str, int]  # by name
ProductRate = tuple[str, float, float]  # class of products, FLOPs, seconds
OpenStep = tuple[int, PassKey]  # id of the step, and its pass


@dataclass
class StepMemory:
    """Bytes: resident in the run, saved by one microbatch for its backward by step and region, and the peak (0 where
    torch does not count)."""

    resident: ByteCounts = field(default_factory=dict[str, int])
    saved: ByteCounts = field(default_factory=dict[str, int])
    peak: int = 0


@dataclass
class WatchedStep:
    profile: StepProfile
    memory: StepMemory
    products: list[ProductRate]


def profile_step(run: Run, take: Callable[[], T]) -> tuple[T, WatchedStep]:
    """Take a step and see where its time and memory went."""
    counter = SavedTensorCounter(run)
    spans = run.executor.spans
    observed = step_observers(run, counter)
    device = run.world.device
    with profile_device(device) as read_profile, counter.watching_regions(), observed:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spans.start_recording()
        report = take()
        # A gather that completes while torch's profiler stops corrupts the profiler's list of events.
        run.parameters.await_all_buckets()
    spans.recording = False
    profile = read_profile()
    memory = StepMemory(resident_bytes(run), counter.saved)
    if device.type == "cuda":
        memory.peak = torch.cuda.max_memory_allocated()
    products = product_rates(run.config, profile, run.world.size)
    watched = WatchedStep(profile, memory, products)
    return report, watched


@contextmanager
def step_observers(run: Run, counter: SavedTensorCounter) -> Iterator[None]:
    """Observe every step of the model, and every phase of train_step but forward and backward themselves."""
    unobserved = run.phase
    run.phase = profiler_mark
    try:
        with run.executor.observed_by(ForwardMarks(), counter):
            yield
    finally:
        run.phase = unobserved


class ForwardMarks:
    """An observer that puts a profiler mark around each step's forward. Backward needs none: the nodes of autograd have
    the numbers of the operations that made them (observe/profile.py)."""

    def __init__(self):
        self.open_marks: dict[OpenStep, Any] = {}

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if kind == "F":
            mark = profiler_mark(step.spec.name, "forward")
            mark.__enter__()
            self.open_marks[id(step), key] = mark

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if kind == "F":
            opened = id(step), key
            mark = self.open_marks.pop(opened)
            mark.__exit__(None, None, None)


class StepUnderWay(threading.local):
    """The names of the step and the region that this thread runs now, and the hooks on what they save: steps may run on
    two threads, and autograd's hooks are those of one."""

    def __init__(self):
        self.names: list[str] = []
        self.hooks: Any = None


class SavedTensorCounter:
    """An observer that counts what the first pass saves for its backward, by the step and region that saved it."""

    def __init__(self, run: Run):
        self.saved = defaultdict[str, int](int)
        self.open = StepUnderWay()
        self.first_key: PassKey | None = None
        self.has_finished = False
        parameters = run.model.parameters()
        self.weights = set(map(storage_identity, parameters))  # whose memory may come and go
        self.seen: set[int] = set()
        self.regions: list[Region] = []
        for module in run.model.modules():
            if isinstance(module, Region):
                self.regions.append(module)

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if self.first_key is None:
            self.first_key = key
        if key != self.first_key:
            self.has_finished = True
        if kind == "F":
            self.open.names.append(step.spec.name)
            hooks = saved_tensors_hooks(self.count, unpacked_as_saved)
            self.open.hooks = hooks
            hooks.__enter__()

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if kind == "F":
            self.open.names.remove(step.spec.name)
            self.open.hooks.__exit__()

    @contextmanager
    def watching_regions(self) -> Iterator[None]:
        hooks: list[Any] = []
        for region in self.regions:
            hooks += self.region_hooks(region)
        yield
        for hook in hooks:
            hook.remove()

    def region_hooks(self, region: Region) -> Iterable[Any]:
        def enter_region(*_: object) -> None:
            self.open.names.append(region.name)

        def leave_region(*_: object) -> None:
            self.open.names.remove(region.name)

        entering = region.register_forward_pre_hook(enter_region)
        leaving = region.register_forward_hook(leave_region)
        return entering, leaving

    def count(self, x: Tensor) -> Tensor:
        address = storage_address(x)
        is_weight = storage_identity(x) in self.weights
        if not self.has_finished and not is_weight and address not in self.seen:
            self.seen.add(address)
            place = " ".join(self.open.names)
            storage = x.untyped_storage()
            self.saved[place] += storage.nbytes()
        return x


def unpacked_as_saved(x: Tensor) -> Tensor:
    return x


def storage_address(x: Tensor) -> int:
    storage = x.untyped_storage()
    return storage.data_ptr()


def storage_identity(x: Tensor) -> int:
    storage = x.untyped_storage()
    return storage._cdata


def resident_bytes(run: Run) -> ByteCounts:
    """Weights, optimizer state, and gradients, which are made as backward reaches them."""
    buckets = run.gradients.buckets
    state = run.optimizer.bytes()
    main = state.pop("main")
    weights = [bucket.storage.weight_bytes() for bucket in buckets]
    return {
        "weights": sum(weights),
        "main weights": main,
        "moments": sum(state.values()),
        "gradients": run.gradients.bytes(),
    }


def all_step_specs(model: ModelConfig) -> list[StepSpec]:
    """Every step of the model, multi-token prediction included."""
    prefixed = prefixed_steps(model)
    return [step for _, step in prefixed]


def product_rates(config: Config, profile: StepProfile, ranks: int) -> list[ProductRate]:
    """Each class of products with the FLOPs of its forward and backward (twice the forward) on one rank, and the time
    of its kernels. Products of attention with the context are a class of their own."""
    seq_len = config.data.seq_len
    tokens = config.train.global_batch * seq_len / ranks
    flops = defaultdict[tuple[str, str], float](float)
    for step in all_step_specs(config.model):
        forward_flops = step_flops_by_kind(step, seq_len)
        for kind, per_token in forward_flops.items():
            flops[step.name, kind] += 3 * per_token * tokens
    rates: list[ProductRate] = []
    for (name, kind), total in flops.items():
        seconds = profile.seconds_of_kind(name, kind)
        if total and seconds:
            label = f"{name} core" if kind == "attention" else name
            rate = label, total, seconds
            rates.append(rate)
    return rates


def step_flops_by_kind(step: StepSpec, seq_len: int) -> dict[str, float]:
    scores = step.context * step.seen(seq_len)
    return {"gemm": 2 * step.matmul, "attention": 2 * scores}


def write_profile_trace(run: Run, watched: WatchedStep) -> None:
    """The events of every rank in one trace, whose first event begins at 0."""

    world = run.world
    own = watched.profile.trace_events(world.rank)
    own += run.executor.spans.events
    by_rank = gather_objects(own, world.everyone)
    if by_rank is None:
        return
    events = list(chain.from_iterable(by_rank))
    begun = min(event.start for event in events)
    shifted = [event.shifted(-begun) for event in events]
    write_trace(run.out / "trace.json", shifted)


def profile_text(run: Run, watched: WatchedStep) -> str:
    """The profile as tables."""
    profile = watched.profile
    console = Console(width=100, record=True, file=StringIO())
    total = profile.seconds * 1e3
    busy = profile.busy_seconds * 1e3
    console.print(f"step {run.step}, watched: {total:.1f} ms, of which {busy:.1f} ms something ran on {profile.device}")
    console.print(step_time_table(run, profile))
    console.print(product_rate_table(watched))
    console.print(memory_table(watched.memory))
    if profile.device == "cuda":
        lines = launch_gap_lines(profile)
        console.print("\n".join(lines))
    text = console.export_text()
    return text.rstrip()


def titled_table(title: str, name: str, *more: str) -> Table:
    return Table(name, *more, title=title, title_justify="left")


def add_number_columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right")


def step_time_table(run: Run, profile: StepProfile) -> Table:
    steps = all_step_specs(run.config.model)
    lanes = {step.name: step.lane for step in steps}
    times = profile.seconds_by_phase()
    names = dict.fromkeys(phase.name for phase in times)
    # Steps in the order of the model, then phases in the order in which they ran.
    ordered = [name for name in lanes if name in names]
    ordered += [name for name in names if name not in lanes]
    table = titled_table("time, ms", "step", "lane")
    add_number_columns(table, "forward", "backward", "otherwise", "share")
    for name in ordered:
        cells = step_time_cells(name, times)
        lane = lanes.get(name, "")
        table.add_row(name, lane, *cells)
    return table


def step_time_cells(name: str, times: dict[StepPhase, float]) -> list[str]:
    """Milliseconds of a step in each direction, and its share of all time."""
    total = 0.0
    by_direction: dict[str, float] = {}
    for phase, seconds in times.items():
        if phase != IN_BACKGROUND:
            total += seconds
        if phase.name == name:
            by_direction[phase.direction] = seconds
    cells: list[str] = []
    for direction in DIRECTIONS:
        cell = ""
        if direction in by_direction:
            milliseconds = by_direction[direction] * 1e3
            cell = f"{milliseconds:.2f}"
        cells.append(cell)
    if name == IN_BACKGROUND.name:
        return [*cells, ""]
    share = sum(by_direction.values()) / total
    return [*cells, f"{share:.1%}"]


def product_rate_table(watched: WatchedStep) -> Table:
    table = titled_table("rate of each class of products", "products")
    add_number_columns(table, "TFLOP", "ms", "TFLOP/s")
    for name, flops, seconds in watched.products:
        teraflops = flops / 1e12
        rate = teraflops / seconds
        milliseconds = seconds * 1e3
        table.add_row(name, f"{teraflops:.3g}", f"{milliseconds:.2f}", f"{rate:.3g}")
    return table


def memory_table(memory: StepMemory) -> Table:
    table = titled_table("memory, GiB", "memory")
    add_number_columns(table, "held")
    for name, size in memory.resident.items():
        table.add_row(name, f"{size / GIB:.3f}")
    table.add_section()
    largest_first = Counter(memory.saved).most_common()
    for name, size in largest_first:
        table.add_row(f"saved in {name}", f"{size / GIB:.3f}")
    if memory.peak:
        table.add_section()
        table.add_row("peak", f"{memory.peak / GIB:.3f}")
    return table


def launch_gap_lines(profile: StepProfile) -> list[str]:
    gaps = profile.idle_gaps()
    seconds = [gap.seconds for gap in gaps]
    idle = 1e3 * sum(seconds)
    long_gaps = [gap for gap in gaps if gap.seconds > LONG_GAP]
    kernels = profile.kernels_run
    lead = 1e3 * median_launch_lead(profile)
    lines = [
        f"launch overhead: {profile.launch_overhead:.1%} of the step, in which nothing ran",
        f"launch gaps: {idle:.2f} ms in all, {len(long_gaps)} of more than 20 us; "
        f"{len(kernels)} works, the host {lead:.1f} ms ahead of the device (median)",
    ]
    for gap in long_gaps[:5]:
        phase = gap.before
        lines.append(f"  {gap.seconds * 1e6:.0f} us before {phase.name} {phase.direction}")
    return lines


def median_launch_lead(profile: StepProfile) -> float:
    """Seconds between the launch of a kernel and its start, median over kernels."""
    kernels = profile.kernels_run
    leads = [kernel.start - kernel.launched for kernel in kernels]
    return median_high(leads) if leads else 0.0
