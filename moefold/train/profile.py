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

from moefold.anatomy.steps import StepSpec, pieces, pieces_ahead
from moefold.comm.collectives import gather_objects
from moefold.config.run import Config
from moefold.model.steps import Carry, Region, Step
from moefold.observe.profile import Profile, mark, profiling
from moefold.observe.trace import write_trace
from moefold.train.assemble import Run

T = TypeVar("T")
GIB = 2**30


@dataclass
class Memory:
    """Bytes: what the run holds, what one microbatch keeps for its backward by step and region, and the most that was
    held at once (0 where torch does not count)."""

    lasting: dict[str, int] = field(default_factory=dict[str, int])
    saved: dict[str, int] = field(default_factory=dict[str, int])
    peak: int = 0


@dataclass
class Watched:
    profile: Profile
    memory: Memory
    products: list[tuple[str, float, float]]  # class of products, FLOPs, seconds


def watch_step(run: Run, take: Callable[[], T]) -> tuple[T, Watched]:
    """Take a step and see where its time and memory went."""
    keeper = Keeper(run)
    with profiling(run.world.device) as profiled, keeper.counting(), marks(run, keeper):
        if run.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run.executor.spans.listen()
        report = take()
    run.executor.spans.listening = False
    profile = profiled()
    memory = Memory(lasting_bytes(run), keeper.saved)
    if run.world.device.type == "cuda":
        memory.peak = torch.cuda.max_memory_allocated()
    return report, Watched(profile, memory, products(run.config, profile, run.world.size))


@contextmanager
def marks(run: Run, keeper: Keeper) -> Iterator[None]:
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
            setattr(owner, method, within(name, getattr(owner, method)))
            undo.callback(delattr, owner, method)
        run.executor.watch = lambda steps: keeper.watch([marked_step(step, keeper) for step in steps])
        undo.callback(delattr, run.executor, "watch")
        yield


def within(name: str, work: Callable[..., T]) -> Callable[..., T]:
    def marked(*args: Any, **more: Any) -> T:
        with mark(name):
            return work(*args, **more)

    return marked


def marked_step(step: Step, keeper: Keeper) -> Step:
    def run(carry: Carry) -> Carry:
        with mark(step.spec.name, "forward"), keeper.inside(step.spec.name):
            return step.run(carry)

    return replace(step, run=run)


class Keeper:
    """Counts what the first microbatch keeps for its backward, by the step and region that saved it first."""

    def __init__(self, run: Run):
        self.saved: dict[str, int] = {}
        self.where: list[str] = []
        self.passages = 0
        self.seen = {storage_of(p) for p in run.model.parameters()}
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
    def counting(self) -> Iterator[None]:
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
        if self.where and self.passages <= 1 and (storage := storage_of(x)) not in self.seen:
            self.seen.add(storage)
            place = " ".join(self.where)
            self.saved[place] = self.saved.get(place, 0) + x.untyped_storage().nbytes()
        return x


def storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def lasting_bytes(run: Run) -> dict[str, int]:
    """Weights, optimizer state, and gradients, which are made as backward reaches them."""
    slices, sums = run.optimizer.slices, [bucket.sums for bucket in run.gradients.buckets]
    return {
        "weights": sum(bucket.weights.nbytes for bucket in run.gradients.buckets),
        "main weights": sum(s.main.nbytes for s in slices if s.has_copy),
        "moments": sum(s.mean.nbytes + s.mean_square.nbytes for s in slices),
        "gradients": sum(each.size * each.dtype.itemsize for each in sums),
    }


def products(config: Config, profile: Profile, ranks: int) -> list[tuple[str, float, float]]:
    """Each class of products with the FLOPs of its forward and backward (twice the forward) on one rank, and the time
    its kernels took. Those of attention with the context are a class of their own."""
    tokens = config.train.global_batch * config.data.seq_len / ranks
    flops: dict[tuple[str, str], float] = {}
    for _, step in (*pieces(config.model), *pieces_ahead(config.model)):
        for kind, each in products_of(step, config.data.seq_len):
            flops[step.name, kind] = flops.get((step.name, kind), 0.0) + 3 * each * tokens
    found = [(name, kind, total, profile.seconds_of(name, kind)) for (name, kind), total in flops.items() if total]
    return [(f"{name} core" if kind == "attention" else name, total, s) for name, kind, total, s in found if s]


def products_of(step: StepSpec, seq_len: int) -> list[tuple[str, float]]:
    return [("gemm", 2 * step.matmul), ("attention", 2 * step.context * step.seen(seq_len))]


def write_profile(run: Run, watched: Watched) -> None:
    """What every rank did, into one trace, from the first event on."""
    own = [*watched.profile.events(run.world.rank), *run.executor.spans.events]
    every = [event for events in gather_objects(own, run.world.everyone) for event in events]
    if run.world.rank == 0:
        begun = min(event.start for event in every)
        shifted = [replace(event, start=event.start - begun, end=event.end - begun) for event in every]
        write_trace(run.out / "trace.json", shifted)


def profile_text(run: Run, watched: Watched) -> str:
    """All there is to see, for people."""
    profile = watched.profile
    console = Console(width=100, record=True, file=StringIO())
    console.print(
        f"step {run.step}, watched: {profile.seconds * 1e3:.1f} ms, of which {profile.busy * 1e3:.1f} ms "
        f"something ran on {profile.device}"
    )
    for table in (time_table(run, profile), product_table(watched), memory_table(watched.memory)):
        console.print(table)
    if profile.device == "cuda":
        console.print("\n".join(gap_lines(profile)))
    return console.export_text().rstrip()


def time_table(run: Run, profile: Profile) -> Table:
    lanes = {step.name: step.lane for _, step in (*pieces(run.config.model), *pieces_ahead(run.config.model))}
    times = profile.by_place()
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


def product_table(watched: Watched) -> Table:
    table = Table("products", title="rate of each class of products", title_justify="left")
    for column in ("TFLOP", "ms", "TFLOP/s"):
        table.add_column(column, justify="right")
    for name, flops, seconds in watched.products:
        table.add_row(name, f"{flops / 1e12:.3g}", f"{seconds * 1e3:.2f}", f"{flops / seconds / 1e12:.3g}")
    return table


def memory_table(memory: Memory) -> Table:
    table = Table("memory", title="memory, GiB", title_justify="left")
    table.add_column("held", justify="right")
    for name, size in memory.lasting.items():
        table.add_row(name, f"{size / GIB:.3f}")
    table.add_section()
    for name, size in sorted(memory.saved.items(), key=lambda item: -item[1]):
        table.add_row(f"saved in {name}", f"{size / GIB:.3f}")
    if memory.peak:
        table.add_section()
        table.add_row("peak", f"{memory.peak / GIB:.3f}")
    return table


def gap_lines(profile: Profile) -> list[str]:
    gaps = profile.gaps()
    idle = sum(gap.seconds for gap in gaps)
    long = [gap for gap in gaps if gap.seconds > 20e-6]
    lead = sorted(work.start - work.launched for work in profile.works)
    ahead = lead[len(lead) // 2] * 1e3 if lead else 0.0
    lines = [
        f"launch gaps: {idle * 1e3:.2f} ms in all, {len(long)} of more than 20 us; "
        f"{len(profile.works)} works, the host {ahead:.1f} ms ahead of the device (median)"
    ]
    return lines + [f"  {g.seconds * 1e6:.0f} us before {g.before.name} {g.before.direction}" for g in long[:5]]
