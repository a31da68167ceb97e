"""Where the time of one step went: what the device did, each piece put down to the step of the model that asked for it.

torch's profiler says what ran when, and who launched it. Forward steps stand inside marks. A node of the backward pass
has the number of the operation that made it, and so the step in whose mark that operation lies:

    host      | attend | route | dispatch | experts | ...    marks
    backward     node 17 <- node 16 ...                      made in `experts`: so is what it launches
    device       k  k k    k   k  kk                         kernels, each with its launch

On a CPU what ran are the operations themselves, each for the time not spent inside another.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity

from moefold.observe.trace import TraceEvent

MARK_PREFIX = "moefold:"
NODE_PREFIX = "autograd::engine::evaluate_function: "
KERNEL_KINDS = {  # by name of a kernel or of an operation; the first that fits
    "attention": r"flash|fmha|sdpa|attention|dq_kernel|dkdv_kernel|delta_kernel",
    "gemm": r"gemm|nvjet|cutlass|_mm|::mm|::bmm|::addmm|matmul|wgmma|splitk",
    "copy": r"memcpy|memset|copy",
}
Direction = Literal["forward", "backward", ""]


@dataclass(frozen=True)
class StepPhase:
    """A step in forward or backward, or a phase between backward and the next step."""

    name: str
    direction: Direction = ""


@dataclass(frozen=True)
class ProfiledKernel:
    """A kernel, or on a CPU an operation, by the clock of the machine."""

    name: str
    place: StepPhase
    lane: str
    start: float
    end: float
    seconds: float  # its own: of an operation, without those inside it
    launched: float  # when the host asked for it

    @property
    def kind(self) -> str:
        text = self.name.lower()
        return next((kind for kind, pattern in KERNEL_KINDS.items() if re.search(pattern, text)), "other")


@dataclass(frozen=True)
class IdleGap:
    """Nothing ran on the device for so long; `before` is what it was waiting for."""

    seconds: float
    before: StepPhase


@dataclass
class StepProfile:
    """What one rank did in one step. Every other number is read off the list of works."""

    begun: float
    seconds: float
    device: str
    kernels_run: list[ProfiledKernel] = field(default_factory=list[ProfiledKernel])
    marks: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    def seconds_by_phase(self) -> dict[StepPhase, float]:
        found: dict[StepPhase, float] = {}
        for work in self.kernels_run:
            found[work.place] = found.get(work.place, 0.0) + work.seconds
        return found

    def seconds_of_kind(self, name: str, kind: str) -> float:
        """Of one kind of work in a step, forward and backward."""
        return sum(work.seconds for work in self.kernels_run if work.place.name == name and work.kind == kind)

    @property
    def busy_seconds(self) -> float:
        """How long anything ran: works of several streams may run at once."""
        return sum(end - start for start, end, _ in self.busy_stretches())

    def busy_stretches(self) -> Iterator[tuple[float, float, ProfiledKernel]]:
        """When the device was busy without a break: from, to, and the work that began it."""
        first: ProfiledKernel | None = None
        end = 0.0
        for work in sorted(self.kernels_run, key=lambda work: work.start):
            if first is not None and work.start > end:
                yield first.start, end, first
                first = None
            first, end = first or work, max(end, work.end) if first else work.end
        if first is not None:
            yield first.start, end, first

    def gaps(self) -> list[IdleGap]:
        """Where the device had nothing to do between two works, longest first."""
        found = [IdleGap(after[0] - before[1], after[2].place) for before, after in pairwise(self.busy_stretches())]
        return sorted(found, key=lambda gap: -gap.seconds)

    def events(self, rank: int) -> list[TraceEvent]:
        """For a trace: every work, by stream or thread, and above them the steps that the host was at."""
        shown = [TraceEvent(rank, "steps", name, start, end) for name, start, end in self.marks]
        for work in (work for work in self.kernels_run if not work.name.startswith(MARK_PREFIX)):
            details = {"step": work.place.name, "direction": work.place.direction, "kind": work.kind}
            shown.append(TraceEvent(rank, work.lane, work.name[:80], work.start, work.end, details))
        return shown


def profiler_mark(name: str, direction: Direction = "") -> Any:
    """What runs inside belongs to this step of forward, or to this phase."""
    return torch.profiler.record_function(f"{MARK_PREFIX}{direction}:{name}")


def phase_of_mark(event: Any) -> StepPhase:
    direction, _, name = event.name()[len(MARK_PREFIX) :].partition(":")
    return StepPhase(name, direction)


@contextmanager
def profile_device(device: torch.device) -> Iterator[Callable[[], StepProfile]]:
    """Watch what runs inside; afterwards the function given says what was seen."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    profiler = torch.profiler.profile(activities=activities)
    with profiler:
        yield lambda: read_kineto_events(profiler, device.type)
        if on_cuda:
            torch.cuda.synchronize()


def read_kineto_events(profiler: torch.profiler.profile, device: str) -> StepProfile:
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None  # noqa: PT018
    every = list(profiler.profiler.kineto_results.events())
    host = [e for e in every if e.device_type() == torch.autograd.DeviceType.CPU]
    places = PhaseLookup(host)
    works = device_kernels(every, host, places) if device == "cuda" else host_operations(host, places)
    marks = [
        (phase_of_mark(e).name, e.start_ns() / 1e9, e.end_ns() / 1e9) for e in host if e.name().startswith(MARK_PREFIX)
    ]
    begun = min((e.start_ns() for e in host), default=0) / 1e9
    ended = max([e.end_ns() / 1e9 for e in host] + [work.end for work in works], default=begun)
    return StepProfile(begun, ended - begun, device, works, marks)


class PhaseLookup:
    """Which step a moment of the host belongs to."""

    def __init__(self, host: Sequence[Any]):
        ordered = sorted(host, key=lambda e: (e.start_ns(), -e.duration_ns()))
        self.nodes = ThreadIntervals([e for e in ordered if e.name().startswith(NODE_PREFIX)])
        self.marks = ThreadIntervals([e for e in ordered if e.name().startswith(MARK_PREFIX)])
        self.step_of_sequence: dict[tuple[int, int], str] = {}
        for e in ordered:  # several operations may show a node's number: the last begun of them made it
            thread, when = e.start_thread_id(), e.start_ns()
            if e.sequence_nr() >= 0 and self.nodes.at(when, thread) is None and (m := self.marks.at(when, thread)):
                self.step_of_sequence[thread, e.sequence_nr()] = phase_of_mark(m).name

    def of(self, when: int, thread: int | None) -> StepPhase:
        """The innermost mark or node around a moment of a thread, or of any."""
        node, inside = self.nodes.at(when, thread), self.marks.at(when, thread)
        if inside is not None and (node is None or inside.start_ns() >= node.start_ns()):
            return phase_of_mark(inside)
        if node is None:
            return StepPhase("elsewhere")
        if node.sequence_nr() < 0:  # a parameter's gradient is complete
            return StepPhase("add up gradients", "backward")
        return StepPhase(self.step_of_sequence.get((node.fwd_thread_id(), node.sequence_nr()), "elsewhere"), "backward")


class ThreadIntervals:
    """Events of one kind by thread, to be asked which of them a moment lies in."""

    def __init__(self, ordered: Iterable[Any]):
        self.of: dict[int, list[Any]] = {}
        for e in ordered:
            self.of.setdefault(e.start_thread_id(), []).append(e)
        self.starts = {thread: [e.start_ns() for e in events] for thread, events in self.of.items()}

    def at(self, when: int, thread: int | None) -> Any | None:
        """The innermost; they nest a few deep at most."""
        found: list[Any] = []
        for each in self.of if thread is None else self.of.keys() & {thread}:
            last = bisect_right(self.starts[each], when)
            candidates = self.of[each][max(0, last - 8) : last]
            found += [e for e in reversed(candidates) if e.end_ns() >= when][:1]
        return max(found, key=lambda e: e.start_ns(), default=None)


def device_kernels(every: Sequence[Any], host: Sequence[Any], places: PhaseLookup) -> list[ProfiledKernel]:
    """Kernels and copies, each where the host was when it launched them: launches do not know torch's threads, but one
    of these launches at a time. Where a launch was not seen, the operation around it is asked."""
    operations = {e.correlation_id(): e for e in host if not re.match(r"cu(da)?[A-Z]", e.name())}
    launches = {e.correlation_id(): e for e in host if re.match(r"cu(da)?[A-Z]", e.name())}
    works: list[ProfiledKernel] = []
    for e in every:
        if e.device_type() == torch.autograd.DeviceType.CPU or e.name().startswith(MARK_PREFIX) or e.duration_ns() == 0:
            continue
        launch = launches.get(e.correlation_id()) or operations.get(e.linked_correlation_id())
        place = places.of(launch.start_ns(), None) if launch is not None else StepPhase("elsewhere")
        launched = launch.start_ns() if launch is not None else e.start_ns()
        times = (e.start_ns(), e.end_ns(), e.duration_ns(), launched)
        works.append(ProfiledKernel(e.name(), place, f"stream {e.device_resource_id()}", *(t / 1e9 for t in times)))
    return works


def host_operations(host: Sequence[Any], places: PhaseLookup) -> list[ProfiledKernel]:
    """Operations with the time that none inside them took."""
    inner: dict[int, int] = {}
    stack: dict[int, list[Any]] = {}
    for e in sorted(host, key=lambda e: (e.start_ns(), -e.duration_ns())):
        open_ones = stack.setdefault(e.start_thread_id(), [])
        while open_ones and open_ones[-1].end_ns() <= e.start_ns():
            open_ones.pop()
        if open_ones:
            inner[id(open_ones[-1])] = inner.get(id(open_ones[-1]), 0) + e.duration_ns()
        open_ones.append(e)
    return [
        ProfiledKernel(
            e.name(),
            places.of(e.start_ns(), e.start_thread_id()),
            f"thread {e.start_thread_id()}",
            *(t / 1e9 for t in times),
        )
        for e in host
        if (times := (e.start_ns(), e.end_ns(), e.duration_ns() - inner.get(id(e), 0), e.start_ns()))[2] > 0
    ]
