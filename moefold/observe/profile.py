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

from moefold.observe.trace import Event

MARK = "moefold:"
NODE = "autograd::engine::evaluate_function: "
KINDS = {  # by name of a kernel or of an operation; the first that fits
    "attention": r"flash|fmha|sdpa|attention|dq_kernel|dkdv_kernel|delta_kernel",
    "gemm": r"gemm|nvjet|cutlass|_mm|::mm|::bmm|::addmm|matmul|wgmma|splitk",
    "copy": r"memcpy|memset|copy",
}
Direction = Literal["forward", "backward", ""]


@dataclass(frozen=True)
class Place:
    """A step in forward or backward, or a phase between backward and the next step."""

    name: str
    direction: Direction = ""


@dataclass(frozen=True)
class Work:
    """A kernel, or on a CPU an operation, by the clock of the machine."""

    name: str
    place: Place
    lane: str
    start: float
    end: float
    seconds: float  # its own: of an operation, without those inside it
    launched: float  # when the host asked for it

    @property
    def kind(self) -> str:
        text = self.name.lower()
        return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), "other")


@dataclass(frozen=True)
class Gap:
    """Nothing ran on the device for so long; `before` is what it was waiting for."""

    seconds: float
    before: Place


@dataclass
class Profile:
    """What one rank did in one step. Every other number is read off the list of works."""

    begun: float
    seconds: float
    device: str
    works: list[Work] = field(default_factory=list[Work])
    marks: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    def by_place(self) -> dict[Place, float]:
        found: dict[Place, float] = {}
        for work in self.works:
            found[work.place] = found.get(work.place, 0.0) + work.seconds
        return found

    def seconds_of(self, name: str, kind: str) -> float:
        """Of one kind of work in a step, forward and backward."""
        return sum(work.seconds for work in self.works if work.place.name == name and work.kind == kind)

    @property
    def busy(self) -> float:
        """How long anything ran: works of several streams may run at once."""
        return sum(end - start for start, end, _ in self.stretches())

    def stretches(self) -> Iterator[tuple[float, float, Work]]:
        """When the device was busy without a break: from, to, and the work that began it."""
        first: Work | None = None
        end = 0.0
        for work in sorted(self.works, key=lambda work: work.start):
            if first is not None and work.start > end:
                yield first.start, end, first
                first = None
            first, end = first or work, max(end, work.end) if first else work.end
        if first is not None:
            yield first.start, end, first

    def gaps(self) -> list[Gap]:
        """Where the device had nothing to do between two works, longest first."""
        found = [Gap(after[0] - before[1], after[2].place) for before, after in pairwise(self.stretches())]
        return sorted(found, key=lambda gap: -gap.seconds)

    def events(self, rank: int) -> list[Event]:
        """For a trace: every work, by stream or thread, and above them the steps that the host was at."""
        shown = [Event(rank, "steps", name, start, end) for name, start, end in self.marks]
        for work in (work for work in self.works if not work.name.startswith(MARK)):
            details = {"step": work.place.name, "direction": work.place.direction, "kind": work.kind}
            shown.append(Event(rank, work.lane, work.name[:80], work.start, work.end, details))
        return shown


def mark(name: str, direction: Direction = "") -> Any:
    """What runs inside belongs to this step of forward, or to this phase."""
    return torch.profiler.record_function(f"{MARK}{direction}:{name}")


def marked(event: Any) -> Place:
    direction, _, name = event.name()[len(MARK) :].partition(":")
    return Place(name, direction)


@contextmanager
def profiling(device: torch.device) -> Iterator[Callable[[], Profile]]:
    """Watch what runs inside; afterwards the function given says what was seen."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    profiler = torch.profiler.profile(activities=activities)
    with profiler:
        yield lambda: read(profiler, device.type)
        if on_cuda:
            torch.cuda.synchronize()


def read(profiler: torch.profiler.profile, device: str) -> Profile:
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None  # noqa: PT018
    every = list(profiler.profiler.kineto_results.events())
    host = [e for e in every if e.device_type() == torch.autograd.DeviceType.CPU]
    places = Places(host)
    works = works_of_device(every, host, places) if device == "cuda" else works_of_host(host, places)
    marks = [(marked(e).name, e.start_ns() / 1e9, e.end_ns() / 1e9) for e in host if e.name().startswith(MARK)]
    begun = min((e.start_ns() for e in host), default=0) / 1e9
    ended = max([e.end_ns() / 1e9 for e in host] + [work.end for work in works], default=begun)
    return Profile(begun, ended - begun, device, works, marks)


class Places:
    """Which step a moment of the host belongs to."""

    def __init__(self, host: Sequence[Any]):
        ordered = sorted(host, key=lambda e: (e.start_ns(), -e.duration_ns()))
        self.nodes = Ranges([e for e in ordered if e.name().startswith(NODE)])
        self.marks = Ranges([e for e in ordered if e.name().startswith(MARK)])
        self.maker: dict[tuple[int, int], str] = {}
        for e in ordered:  # several operations may show a node's number: the last begun of them made it
            thread, when = e.start_thread_id(), e.start_ns()
            if e.sequence_nr() >= 0 and self.nodes.at(when, thread) is None and (m := self.marks.at(when, thread)):
                self.maker[thread, e.sequence_nr()] = marked(m).name

    def of(self, when: int, thread: int | None) -> Place:
        """The innermost mark or node around a moment of a thread, or of any."""
        node, inside = self.nodes.at(when, thread), self.marks.at(when, thread)
        if inside is not None and (node is None or inside.start_ns() >= node.start_ns()):
            return marked(inside)
        if node is None:
            return Place("elsewhere")
        if node.sequence_nr() < 0:  # a parameter's gradient is complete
            return Place("add up gradients", "backward")
        return Place(self.maker.get((node.fwd_thread_id(), node.sequence_nr()), "elsewhere"), "backward")


class Ranges:
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


def works_of_device(every: Sequence[Any], host: Sequence[Any], places: Places) -> list[Work]:
    """Kernels and copies, each where the host was when it launched them: launches do not know torch's threads, but one
    of these launches at a time. Where a launch was not seen, the operation around it is asked."""
    operations = {e.correlation_id(): e for e in host if not re.match(r"cu(da)?[A-Z]", e.name())}
    launches = {e.correlation_id(): e for e in host if re.match(r"cu(da)?[A-Z]", e.name())}
    works: list[Work] = []
    for e in every:
        if e.device_type() == torch.autograd.DeviceType.CPU or e.name().startswith(MARK) or e.duration_ns() == 0:
            continue
        launch = launches.get(e.correlation_id()) or operations.get(e.linked_correlation_id())
        place = places.of(launch.start_ns(), None) if launch is not None else Place("elsewhere")
        launched = launch.start_ns() if launch is not None else e.start_ns()
        times = (e.start_ns(), e.end_ns(), e.duration_ns(), launched)
        works.append(Work(e.name(), place, f"stream {e.device_resource_id()}", *(t / 1e9 for t in times)))
    return works


def works_of_host(host: Sequence[Any], places: Places) -> list[Work]:
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
        Work(
            e.name(),
            places.of(e.start_ns(), e.start_thread_id()),
            f"thread {e.start_thread_id()}",
            *(t / 1e9 for t in times),
        )
        for e in host
        if (times := (e.start_ns(), e.end_ns(), e.duration_ns() - inner.get(id(e), 0), e.start_ns()))[2] > 0
    ]
