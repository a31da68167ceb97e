"""Profile of one step: what the device ran, each kernel assigned to the model's step that launched it.

torch's profiler reports kernels with times and launches. Forward steps stand inside marks. A node of the backward pass
has the sequence number of the operation that made it, and so the step in whose mark that operation lies:

    host      | attend | route | dispatch | experts | ...    marks
    backward     node 17 <- node 16 ...                      made in `experts`: so is what it launches
    device       k  k k    k   k  kk                         kernels, each with its launch

On a CPU the operations themselves take the place of kernels, each for the time not spent inside another.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, methodcaller
from typing import Any, Literal

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity

from moefold.observe.trace import TraceEvent

MARK_PREFIX = "moefold:"
GLOO_PREFIX = "gloo:"  # a collective in one of gloo's own threads
NODE_PREFIX = "autograd::engine::evaluate_function: "
RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]")  # a call of the CUDA runtime or driver, such as a launch
DEEPEST_NESTING = 8  # of marks or of nodes
KERNEL_KINDS = {  # by name of a kernel or of an operation; the first that fits
    "attention": r"flash|fmha|sdpa|attention|dq_kernel|dkdv_kernel|delta_kernel",
    "gemm": r"gemm|nvjet|cutlass|_mm|::mm|::bmm|::addmm|matmul|wgmma|splitk",
    "copy": r"memcpy|memset|copy",
}
Direction = Literal["forward", "backward", ""]
Events = Sequence[Any]  # of torch's profiler
HostMark = tuple[str, float, float]  # of a step: name, start, end
BusyStretch = tuple[float, float, "ProfiledKernel"]  # start, end, and the kernel that began it


@dataclass(frozen=True)
class StepPhase:
    """A step in forward or backward, or a phase between backward and the next step."""

    name: str
    direction: Direction = ""


UNASSIGNED = StepPhase("elsewhere")
IN_BACKGROUND = StepPhase("collectives")  # in gloo's threads, beside the steps: no part of the sum of their times


@dataclass(frozen=True)
class ProfiledKernel:
    """A kernel, or on a CPU an operation, by the clock of the machine."""

    name: str
    place: StepPhase
    lane: str
    start: float
    end: float
    seconds: float  # its own: of an operation, without those inside it
    launched: float  # the host's time of the launch

    @property
    def kind(self) -> str:
        text = self.name.lower()
        for kind, pattern in KERNEL_KINDS.items():
            if re.search(pattern, text):
                return kind
        return "other"

    def trace_event(self, rank: int) -> TraceEvent:
        details = {
            "step": self.place.name,
            "direction": self.place.direction,
            "kind": self.kind,
        }
        name = self.name[:80]
        return TraceEvent(rank, self.lane, name, self.start, self.end, details)


@dataclass(frozen=True)
class IdleGap:
    """A time in which nothing ran on the device; `before` is the phase of the kernel that ended it."""

    seconds: float
    before: StepPhase


@dataclass
class StepProfile:
    """One rank's kernels in one step. Every other figure is computed from the list."""

    begun: float
    seconds: float
    device: str
    kernels_run: list[ProfiledKernel] = field(default_factory=list[ProfiledKernel])
    marks: list[HostMark] = field(default_factory=list[HostMark])

    def seconds_by_phase(self) -> dict[StepPhase, float]:
        seconds: dict[StepPhase, float] = {}
        for kernel in self.kernels_run:
            before = seconds.get(kernel.place, 0.0)
            seconds[kernel.place] = before + kernel.seconds
        return seconds

    def seconds_of_kind(self, name: str, kind: str) -> float:
        """The time of one kind of kernels in a step, forward and backward."""
        total = 0.0
        for kernel in self.kernels_run:
            if kernel.place.name == name and kernel.kind == kind:
                total += kernel.seconds
        return total

    @property
    def busy_seconds(self) -> float:
        """The time in which anything ran: kernels of several streams may run at once."""
        seconds = 0
        for start, end, _ in self.busy_stretches():
            seconds += end - start
        return seconds

    @property
    def launch_overhead(self) -> float:
        """The share of the step in which nothing ran: the device waited for the host."""
        busy_share = self.busy_seconds / self.seconds
        return 1 - busy_share

    def busy_stretches(self) -> Iterator[BusyStretch]:
        """Times in which the device was busy without a break."""
        first: ProfiledKernel | None = None
        end = 0.0
        for kernel in sorted(self.kernels_run, key=attrgetter("start")):
            if first is not None and kernel.start > end:
                yield first.start, end, first
                first = None
            if first is None:
                first = kernel
                end = kernel.end
            else:
                end = max(end, kernel.end)
        if first is not None:
            yield first.start, end, first

    def idle_gaps(self) -> list[IdleGap]:
        """Times between two busy stretches, longest first."""
        gaps: list[IdleGap] = []
        for before, after in pairwise(self.busy_stretches()):
            _, ended, _ = before
            begun, _, kernel = after
            gap = IdleGap(begun - ended, kernel.place)
            gaps.append(gap)
        return sorted(gaps, key=attrgetter("seconds"), reverse=True)

    def trace_events(self, rank: int) -> list[TraceEvent]:
        """Events for a trace: every kernel, by stream or thread, and above them the host's marks."""
        events = [TraceEvent(rank, "steps", *mark) for mark in self.marks]
        for kernel in self.kernels_run:
            if not kernel.name.startswith(MARK_PREFIX):
                events.append(kernel.trace_event(rank))
        return events


def profiler_mark(name: str, direction: Direction = "") -> Any:
    """A context manager: the kernels launched inside belong to this step of forward, or to this phase."""
    return torch.profiler.record_function(f"{MARK_PREFIX}{direction}:{name}")


def is_mark(event: Any) -> bool:
    return event.name().startswith(MARK_PREFIX)


def is_node(event: Any) -> bool:
    return event.name().startswith(NODE_PREFIX)


def phase_of_mark(event: Any) -> StepPhase:
    text = event.name().removeprefix(MARK_PREFIX)
    direction, _, name = text.partition(":")
    return StepPhase(name, direction)


@contextmanager
def profile_device(device: torch.device) -> Iterator[Callable[[], StepProfile]]:
    """Profile what runs inside. Yields a function that returns the profile afterwards."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
    # Exchanges may run on a thread of their own (comm/lanes.py).
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    profiler = torch.profiler.profile(activities=activities, experimental_config=all_threads)

    def read_profile() -> StepProfile:
        return read_kineto_events(profiler, device.type)

    with profiler:
        yield read_profile
        if on_cuda:
            torch.cuda.synchronize()


def read_kineto_events(profiler: torch.profiler.profile, device: str) -> StepProfile:
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = list(results.events())
    host = list(filter(is_on_host, events))
    phases = PhaseLookup(host)
    if device == "cuda":
        kernels = device_kernels(events, host, phases)
    else:
        kernels = host_operations(host, phases)
    marks = list(map(host_mark, filter(is_mark, host)))
    # From the host's first event to the end of the last, on the host or on the device.
    starts = map(start_seconds, host)
    ends = list(map(end_seconds, host))
    ends += [kernel.end for kernel in kernels]
    begun = min(starts, default=0.0)
    ended = max(ends, default=begun)
    return StepProfile(begun, ended - begun, device, kernels, marks)


def start_seconds(event: Any) -> float:
    return event.start_ns() / 1e9


def end_seconds(event: Any) -> float:
    return event.end_ns() / 1e9


def host_mark(event: Any) -> HostMark:
    name = phase_of_mark(event).name
    return name, start_seconds(event), end_seconds(event)


def is_on_host(event: Any) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CPU


def outermost_first(events: Events) -> list[Any]:
    """Events by their beginning; of those that begin together, the longest first."""
    by_length = sorted(events, key=methodcaller("duration_ns"), reverse=True)
    return sorted(by_length, key=methodcaller("start_ns"))


class PhaseLookup:
    """Finds the step or phase that a moment of the host belongs to."""

    def __init__(self, host: Events):
        ordered = outermost_first(host)
        nodes = filter(is_node, ordered)
        marks = filter(is_mark, ordered)
        self.nodes = ThreadIntervals(nodes)
        self.marks = ThreadIntervals(marks)
        self.step_of_sequence: dict[tuple[int, int], str] = {}
        # Several operations may show a node's sequence number: the last begun of them made the node.
        for event in ordered:
            if event.sequence_nr() >= 0:
                self.note_sequence(event)

    def note_sequence(self, event: Any) -> None:
        """Remember the step of an operation in forward by its sequence number."""
        thread = event.start_thread_id()
        when = event.start_ns()
        mark = self.marks.innermost(when, thread)
        node = self.nodes.innermost(when, thread)
        if mark is not None and node is None:
            made = thread, event.sequence_nr()
            phase = phase_of_mark(mark)
            self.step_of_sequence[made] = phase.name

    def phase_at(self, when: int, thread: int | None) -> StepPhase:
        """The innermost mark or node around a moment of a thread, or of any thread (None)."""
        node = self.nodes.innermost(when, thread)
        mark = self.marks.innermost(when, thread)
        if node is None:
            return UNASSIGNED if mark is None else phase_of_mark(mark)
        is_inside_node = mark is not None and mark.start_ns() >= node.start_ns()
        if is_inside_node:
            return phase_of_mark(mark)
        if node.sequence_nr() < 0:  # a parameter's gradient is complete
            return StepPhase("add up gradients", "backward")
        made_by = node.fwd_thread_id(), node.sequence_nr()
        step = self.step_of_sequence.get(made_by, UNASSIGNED.name)
        return StepPhase(step, "backward")


class ThreadIntervals:
    """Events of one kind by thread, to find the one around a moment."""

    def __init__(self, ordered: Iterable[Any]):
        self.by_thread = defaultdict[int, list[Any]](list)
        for event in ordered:
            thread = event.start_thread_id()
            self.by_thread[thread].append(event)

    def innermost(self, when: int, thread: int | None) -> Any | None:
        """The innermost event around a moment of a thread, or of any thread (None)."""
        threads = list(self.by_thread) if thread is None else [thread]
        found: list[Any] = []
        for each in threads:
            event = self.last_around(when, each)
            if event is not None:
                found.append(event)
        return max(found, key=methodcaller("start_ns"), default=None)

    def last_around(self, when: int, thread: int) -> Any | None:
        """The last begun event of a thread that has not ended; None if there is none."""
        events = self.by_thread[thread]
        begun = bisect_right(events, when, key=methodcaller("start_ns"))
        first = max(0, begun - DEEPEST_NESTING)
        for event in reversed(events[first:begun]):
            if event.end_ns() >= when:
                return event
        return None


def device_kernels(events: Events, host: Events, phases: PhaseLookup) -> list[ProfiledKernel]:
    """Kernels and copies, each in the phase of the host at its launch. A launch does not have torch's thread id, the
    operation around it has. Where a launch was not recorded, the operation around it stands in."""
    operations: dict[int, Any] = {}
    launches: dict[int, Any] = {}
    for event in host:
        is_launch = RUNTIME_CALL.match(event.name())
        by_correlation = launches if is_launch else operations
        by_correlation[event.correlation_id()] = event
    operations.pop(0, None)  # no operation: the number that a kernel outside of all has
    kernels: list[ProfiledKernel] = []
    for event in events:
        duration = event.duration_ns()
        if is_on_host(event) or is_mark(event) or duration == 0:
            continue
        # The phase is that of the host at the launch, not at the kernel's start.
        around = operations.get(event.linked_correlation_id())
        launch = launches.get(event.correlation_id(), around)
        phase = UNASSIGNED
        launched = event.start_ns()
        if launch is not None:
            launched = launch.start_ns()
            thread = None if around is None else around.start_thread_id()
            phase = phases.phase_at(launched, thread)
        lane = f"stream {event.device_resource_id()}"
        kernel = profiled_kernel(event, phase, lane, duration, launched)
        kernels.append(kernel)
    return kernels


def host_operations(host: Events, phases: PhaseLookup) -> list[ProfiledKernel]:
    """Operations with the time that none inside them took."""
    inner_times = times_of_inner_operations(host)
    operations: list[ProfiledKernel] = []
    for event in host:
        inner_time = inner_times[id(event)]
        own_time = event.duration_ns() - inner_time
        if own_time <= 0:
            continue
        thread = event.start_thread_id()
        start = event.start_ns()
        if event.name().startswith(GLOO_PREFIX):
            phase = IN_BACKGROUND
        else:
            phase = phases.phase_at(start, thread)
        lane = f"thread {thread}"
        operation = profiled_kernel(event, phase, lane, own_time, start)
        operations.append(operation)
    return operations


def times_of_inner_operations(host: Events) -> Mapping[int, int]:
    """By id of an event: the nanoseconds of the operations directly inside it."""
    inner_times = defaultdict[int, int](int)
    open_by_thread = defaultdict[int, list[Any]](list)
    for event in outermost_first(host):
        # The events that are still open when this one begins enclose it; the last of them directly.
        open_events = open_by_thread[event.start_thread_id()]
        while open_events and open_events[-1].end_ns() <= event.start_ns():
            open_events.pop()
        if open_events:
            outer = id(open_events[-1])
            inner_times[outer] += event.duration_ns()
        open_events.append(event)
    return inner_times


def profiled_kernel(event: Any, phase: StepPhase, lane: str, nanoseconds: int, launched: int) -> ProfiledKernel:
    start = start_seconds(event)
    end = end_seconds(event)
    own_seconds = nanoseconds / 1e9
    launch = launched / 1e9
    return ProfiledKernel(event.name(), phase, lane, start, end, own_seconds, launch)
