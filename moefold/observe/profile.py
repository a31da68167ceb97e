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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
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
    marks: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    def seconds_by_phase(self) -> dict[StepPhase, float]:
        seconds: dict[StepPhase, float] = {}
        for kernel in self.kernels_run:
            before = seconds.get(kernel.place, 0.0)
            seconds[kernel.place] = before + kernel.seconds
        return seconds

    def seconds_of_kind(self, name: str, kind: str) -> float:
        """The time of one kind of kernels in a step, forward and backward."""
        in_step = [kernel for kernel in self.kernels_run if kernel.place.name == name]
        return sum(kernel.seconds for kernel in in_step if kernel.kind == kind)

    @property
    def busy_seconds(self) -> float:
        """The time in which anything ran: kernels of several streams may run at once."""
        return sum(end - start for start, end, _ in self.busy_stretches())

    def busy_stretches(self) -> Iterator[tuple[float, float, ProfiledKernel]]:
        """Times in which the device was busy without a break: start, end, and the kernel that began it."""
        first: ProfiledKernel | None = None
        end = 0.0
        for kernel in sorted(self.kernels_run, key=start_of):
            if first is not None and kernel.start > end:
                yield first.start, end, first
                first = None
            if first is None:
                first, end = kernel, kernel.end
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
            gaps.append(IdleGap(begun - ended, kernel.place))
        return sorted(gaps, key=length_of, reverse=True)

    def trace_events(self, rank: int) -> list[TraceEvent]:
        """Events for a trace: every kernel, by stream or thread, and above them the host's marks."""
        events = [TraceEvent(rank, "steps", name, start, end) for name, start, end in self.marks]
        for kernel in self.kernels_run:
            if kernel.name.startswith(MARK_PREFIX):
                continue
            phase = kernel.place
            details = {"step": phase.name, "direction": phase.direction, "kind": kernel.kind}
            events.append(TraceEvent(rank, kernel.lane, kernel.name[:80], kernel.start, kernel.end, details))
        return events


def start_of(kernel: ProfiledKernel) -> float:
    return kernel.start


def length_of(gap: IdleGap) -> float:
    return gap.seconds


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
    profiler = torch.profiler.profile(activities=activities)

    def read_profile() -> StepProfile:
        return read_kineto_events(profiler, device.type)

    with profiler:
        yield read_profile
        if on_cuda:
            torch.cuda.synchronize()


def read_kineto_events(profiler: torch.profiler.profile, device: str) -> StepProfile:
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = list(profiler.profiler.kineto_results.events())
    host = [event for event in events if is_on_host(event)]
    phases = PhaseLookup(host)
    kernels = device_kernels(events, host, phases) if device == "cuda" else host_operations(host, phases)
    marks = [(phase_of_mark(e).name, e.start_ns() / 1e9, e.end_ns() / 1e9) for e in host if is_mark(e)]
    begun = min((event.start_ns() for event in host), default=0) / 1e9
    ends = [event.end_ns() / 1e9 for event in host]
    ends += [kernel.end for kernel in kernels]
    ended = max(ends, default=begun)
    return StepProfile(begun, ended - begun, device, kernels, marks)


def is_on_host(event: Any) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CPU


def outermost_first(events: Sequence[Any]) -> list[Any]:
    """Events by their beginning; of those that begin together, the longest first."""
    return sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns()))


class PhaseLookup:
    """Finds the step or phase that a moment of the host belongs to."""

    def __init__(self, host: Sequence[Any]):
        ordered = outermost_first(host)
        self.nodes = ThreadIntervals(event for event in ordered if is_node(event))
        self.marks = ThreadIntervals(event for event in ordered if is_mark(event))
        self.step_of_sequence: dict[tuple[int, int], str] = {}
        # Several operations may show a node's sequence number: the last begun of them made the node.
        for event in ordered:
            if event.sequence_nr() >= 0:
                self.note_sequence(event)

    def note_sequence(self, event: Any) -> None:
        """Remember the step of an operation in forward by its sequence number."""
        thread, when = event.start_thread_id(), event.start_ns()
        mark = self.marks.innermost(when, thread)
        if mark is not None and self.nodes.innermost(when, thread) is None:
            self.step_of_sequence[thread, event.sequence_nr()] = phase_of_mark(mark).name

    def phase_at(self, when: int, thread: int | None) -> StepPhase:
        """The innermost mark or node around a moment of a thread, or of any thread (None)."""
        node = self.nodes.innermost(when, thread)
        mark = self.marks.innermost(when, thread)
        if mark is not None and (node is None or mark.start_ns() >= node.start_ns()):
            return phase_of_mark(mark)
        if node is None:
            return UNASSIGNED
        if node.sequence_nr() < 0:  # a parameter's gradient is complete
            return StepPhase("add up gradients", "backward")
        made_by = (node.fwd_thread_id(), node.sequence_nr())
        return StepPhase(self.step_of_sequence.get(made_by, UNASSIGNED.name), "backward")


class ThreadIntervals:
    """Events of one kind by thread, to find the one around a moment."""

    def __init__(self, ordered: Iterable[Any]):
        self.by_thread: dict[int, list[Any]] = {}
        for event in ordered:
            self.by_thread.setdefault(event.start_thread_id(), []).append(event)
        self.starts = {thread: [event.start_ns() for event in events] for thread, events in self.by_thread.items()}

    def innermost(self, when: int, thread: int | None) -> Any | None:
        """The innermost event around a moment of a thread, or of any thread (None)."""
        threads = self.by_thread if thread is None else self.by_thread.keys() & {thread}
        around = [event for each in threads for event in self.last_around(when, each)]
        return max(around, key=lambda event: event.start_ns(), default=None)

    def last_around(self, when: int, thread: int) -> list[Any]:
        """The last begun event of a thread that has not ended, in a list; empty if there is none."""
        begun = bisect_right(self.starts[thread], when)
        nearest = self.by_thread[thread][max(0, begun - DEEPEST_NESTING) : begun]
        return [event for event in reversed(nearest) if event.end_ns() >= when][:1]


def device_kernels(events: Sequence[Any], host: Sequence[Any], phases: PhaseLookup) -> list[ProfiledKernel]:
    """Kernels and copies, each in the phase of the host at its launch. Launches do not have torch's thread ids, but
    only one thread launches at a time. Where a launch was not recorded, the operation around it stands in."""
    operations: dict[int, Any] = {}
    launches: dict[int, Any] = {}
    for event in host:
        by_correlation = launches if RUNTIME_CALL.match(event.name()) else operations
        by_correlation[event.correlation_id()] = event
    kernels: list[ProfiledKernel] = []
    for event in events:
        if is_on_host(event) or is_mark(event) or event.duration_ns() == 0:
            continue
        # The phase is that of the host at the launch, not at the kernel's start.
        launch = launches.get(event.correlation_id()) or operations.get(event.linked_correlation_id())
        phase = UNASSIGNED if launch is None else phases.phase_at(launch.start_ns(), None)
        launched = event.start_ns() if launch is None else launch.start_ns()
        lane = f"stream {event.device_resource_id()}"
        kernels.append(profiled_kernel(event, phase, lane, event.duration_ns(), launched))
    return kernels


def host_operations(host: Sequence[Any], phases: PhaseLookup) -> list[ProfiledKernel]:
    """Operations with the time that none inside them took."""
    inner_times = times_of_inner_operations(host)
    operations: list[ProfiledKernel] = []
    for event in host:
        own_time = event.duration_ns() - inner_times.get(id(event), 0)
        if own_time > 0:
            thread = event.start_thread_id()
            in_background = event.name().startswith(GLOO_PREFIX)
            phase = IN_BACKGROUND if in_background else phases.phase_at(event.start_ns(), thread)
            operations.append(profiled_kernel(event, phase, f"thread {thread}", own_time, event.start_ns()))
    return operations


def times_of_inner_operations(host: Sequence[Any]) -> dict[int, int]:
    """By id of an event: the nanoseconds of the operations directly inside it."""
    inner_times: dict[int, int] = {}
    open_by_thread: dict[int, list[Any]] = {}
    for event in outermost_first(host):
        # The events that are still open when this one begins enclose it; the last of them directly.
        open_events = open_by_thread.setdefault(event.start_thread_id(), [])
        while open_events and open_events[-1].end_ns() <= event.start_ns():
            open_events.pop()
        if open_events:
            outer = id(open_events[-1])
            inner_times[outer] = inner_times.get(outer, 0) + event.duration_ns()
        open_events.append(event)
    return inner_times


def profiled_kernel(event: Any, phase: StepPhase, lane: str, nanoseconds: int, launched: int) -> ProfiledKernel:
    start, end = event.start_ns() / 1e9, event.end_ns() / 1e9
    return ProfiledKernel(event.name(), phase, lane, start, end, nanoseconds / 1e9, launched / 1e9)
