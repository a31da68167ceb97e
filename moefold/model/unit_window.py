"""A window of units: weights that come before the steps that use them, ahead of time, and leave behind them.

    steps      | unit 0 | unit 1 | unit 2 |           of two units all weights are here: of the one in use, and of the
    on the way | 1      | 2      | 3      |           next, which is on its way

Which units a step uses is seen in its first forward: a module asks for what it needs when it is called. From then on
the units of a step are known before it runs, forward and backward, and so are those that come next. Weights do not
change within a step of the optimizer, so a unit that is still here is not brought again: the last one of a forward
serves the backward that follows, and a forward that is run again in backward (recompute) uses what backward needs
anyway. At the end of a pass the units come next that the pass of the program's next slot begins with.

Everything is begun by the thread that runs steps with weights, in the order of the program: the same on all ranks.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moefold.model.steps import PassKey, PassKind, Step
from moefold.model.unit_memory import UnitMemory, bytes_of_unit, make_unit_memory
from moefold.observe.trace import SpanRecorder

Units = frozenset[str]
StepListKey = tuple[int, bool]  # stage, and whether gradients are wanted
ComingPass = tuple[StepListKey, PassKind]


class UnitsInTurn(NamedTuple):
    """Neighbouring steps that use the same units: the number of their turn in the order of forward."""

    order: list[Units]
    number: int

    @property
    def units(self) -> Units:
        return self.order[self.number]

    def neighbour(self, kind: PassKind) -> Units:
        """The units of the turn that comes next, forward or backward."""
        step = 1 if kind == "F" else -1
        number = self.number + step
        if 0 <= number < len(self.order):
            return self.order[number]
        return frozenset()


class PendingWeights(Protocol):
    """Weights of a unit on their way."""

    def wait(self) -> None:
        """Have the weights, for the current stream, and what is made of them."""
        ...

    def wait_for_works(self) -> None:
        """Have what arrives, for the current stream, where another thread makes something of it."""
        ...

    def arriving_tensors(self) -> Iterable[Tensor]: ...


@dataclass
class UnitArrival:
    """The weights of a unit that has memory, and when they were sent for. Every thread waits for them once: lanes of a
    GPU are streams, each of which must wait. The first one makes what is made of them."""

    unit: str
    begun: float
    pending: Sequence[PendingWeights]
    waited: set[int] = field(default_factory=set)  # threads
    streams: list[Any] = field(default_factory=list)  # theirs, on a GPU
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_made: torch.cuda.Event | None = None  # on the stream of the first thread

    def wait(self, spans: SpanRecorder, what: str) -> None:
        thread = threading.get_ident()
        with self.lock:
            if thread in self.waited:
                return
            is_first = not self.waited
            for weights in self.pending:
                if is_first:
                    weights.wait()
                else:
                    weights.wait_for_works()
            self.keep_for_this_stream(is_first)
            self.waited.add(thread)
        if is_first and spans.recording:
            spans.add_span(self.unit, what, self.begun)

    def keep_for_this_stream(self, is_first: bool) -> None:
        """Keep the allocator from reusing its memory, once it is freed, before the current stream is done with it; and
        the stream from reading what the first one has not made."""
        for weights in self.pending:
            for tensor in weights.arriving_tensors():
                if not tensor.is_cuda:
                    return
                stream = torch.cuda.current_stream()
                tensor.record_stream(stream)
        self.streams.append(torch.cuda.current_stream())
        if is_first:
            self.is_made = torch.cuda.Event()
            self.is_made.record()
        elif self.is_made is not None:
            self.is_made.wait()

    def reads_so_far(self) -> list[Any]:
        """Events behind all that reads the unit."""
        return [stream.record_event() for stream in self.streams]


class SeenUnits(threading.local):
    """The units that modules have asked for in the step that this thread runs; None outside of a first forward."""

    units: set[str] | None = None


class UnitWindow(ABC):
    """Units of weights of which at most `most` are here at a time, or as many as a step uses. An observer of steps.
    `arrives` names what spans of time show, `late_units` counts units that were sent for only when a step used them."""

    arrives = "arrivals"

    def __init__(self, spans: SpanRecorder, most: int):
        self.spans = spans
        self.most = most
        self.here: dict[str, UnitArrival] = {}  # units with memory, the one used last at the end
        self.in_use: dict[PassKind, Units] = {}  # by the passes that run, of which paired slots have two
        self.next: dict[PassKind, Units] = {}  # what each of them was brought ahead
        self.turns: dict[int, UnitsInTurn] = {}  # by the identity of a step
        self.steps: list[Step] = []  # those steps, kept so that none takes the identity of another
        self.orders = defaultdict[StepListKey, list[Units]](list)
        self.coming: Sequence[ComingPass] = ()
        self.late_units = 0
        self.arrivals = 0
        self.seen = SeenUnits()
        self.lock = threading.RLock()

    @abstractmethod
    def units(self) -> Collection[str]:
        """The units that come and go; others are always here."""

    @abstractmethod
    def tensors_of(self, unit: str) -> list[Tensor]:
        """What has memory while the unit is here."""

    @abstractmethod
    def bring(self, unit: str, readers: Sequence[Any]) -> Sequence[PendingWeights]:
        """Begin to fill the unit's memory. `readers`: events behind those of the units that had it before."""

    @abstractmethod
    def release(self, unit: str) -> None:
        """The unit's memory is taken."""

    @cached_property
    def memory(self) -> UnitMemory:
        sizes = [bytes_of_unit(self.tensors_of(unit)) for unit in self.units()]
        return make_unit_memory(sizes)

    def comes_and_goes(self, unit: str) -> bool:
        return unit in self.units()

    def enter_backward(self, units: Units) -> None:
        """Backward has come to these units."""
        return

    # ---- what modules and steps ask for

    def attach_units(self, module: nn.Module, units: Units) -> None:
        """Let calls of the module ask for the units that it reads."""
        hook = partial(self.before_module, units)
        module.register_forward_pre_hook(hook)

    def before_module(self, units: Units, *_: object) -> None:
        """A module is about to read the weights of these units."""
        if self.seen.units is not None:
            self.seen.units |= units
        self.require(units)

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        turn = self.turns.get(id(step))
        if turn is None:
            self.seen.units = set()
            with self.lock:
                self.note_use(kind, frozenset())
            return
        if not turn.units:
            return
        with self.lock:
            if kind == "D":
                self.enter_backward(turn.units)
            self.note_use(kind, turn.units)
        self.require(turn.units)
        following = turn.neighbour(kind) or self.first_of_coming_pass(kind)
        with self.lock:
            self.bring_ahead(kind, following)

    def note_use(self, kind: PassKind, units: Units) -> None:
        self.in_use[kind] = units
        self.next.pop(kind, None)

    def announce(self, coming: Sequence[ComingPass]) -> None:
        """The passes of the slot behind the one that begins. Those that begin were announced before."""
        with self.lock:
            self.in_use.clear()
            self.next.clear()
            for beginning in self.coming:
                _, kind = beginning
                self.next[kind] = self.first_of_pass(beginning)
            self.coming = coming

    def first_of_pass(self, coming: ComingPass) -> Units:
        key, kind = coming
        order = self.orders.get(key)
        if not order:
            return frozenset()
        return order[0] if kind == "F" else order[-1]

    def first_of_coming_pass(self, kind: PassKind) -> Units:
        """What a pass of this kind in the next slot begins with; if there is none, one of the other kind."""
        in_order = sorted(self.coming, key=lambda coming: coming[1] != kind)
        for coming in in_order:
            first = self.first_of_pass(coming)
            if first:
                return first
        return frozenset()

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if self.seen.units is None:
            return
        units = frozenset(self.seen.units)
        self.seen.units = None
        with self.lock:
            self.remember(step, units, key)

    def remember(self, step: Step, units: Units, key: PassKey) -> None:
        """Note the units of a step after its first forward. A step without weights belongs to no turn."""
        stage, _ = key
        has_gradients = torch.is_grad_enabled()
        order = self.orders[stage, has_gradients]
        self.steps.append(step)
        identity = id(step)
        if not units:
            self.turns[identity] = UnitsInTurn([units], 0)
            return
        if not order or order[-1] != units:
            order.append(units)
        number = len(order) - 1
        self.turns[identity] = UnitsInTurn(order, number)

    # ---- arrivals

    def require(self, units: Iterable[str]) -> None:
        """Have these units here: sent for and awaited. Nobody waits under the lock: gathers end when other ranks have
        begun them, which the other lane of this rank may have to let them."""
        wanted = [unit for unit in sorted(units) if self.comes_and_goes(unit)]
        arrivals: list[UnitArrival] = []
        with self.lock:
            keep = {*wanted, *self.used_now()}
            for unit in wanted:
                self.late_units += unit not in self.here
                self.begin_arrival(unit, keep)
            for unit in wanted:
                arrival = self.here.pop(unit)
                self.here[unit] = arrival  # at the end: used last
                arrivals.append(arrival)
        for arrival in arrivals:
            arrival.wait(self.spans, self.arrives)

    def used_now(self) -> set[str]:
        """The units of this window that passes use."""
        used = chain.from_iterable(self.in_use.values())
        return set(filter(self.comes_and_goes, used))

    def bring_ahead(self, kind: PassKind, units: Units) -> None:
        """Send for units that come next in a pass, as far as there is room beside those in use."""
        keep = self.used_now()
        following = filter(self.comes_and_goes, units)
        self.next[kind] = units
        for unit in sorted(following):
            keep.add(unit)
            if len(keep) > self.most:
                return
            self.begin_arrival(unit, keep)

    def begin_arrival(self, unit: str, keep: set[str]) -> None:
        if unit in self.here:
            return
        self.make_room(keep)
        begun = time.time()
        tensors = self.tensors_of(unit)
        readers = self.memory.lend(unit, tensors)
        pending = self.bring(unit, readers)
        self.here[unit] = UnitArrival(unit, begun, pending)
        self.arrivals += 1

    def make_room(self, keep: set[str]) -> None:
        """Free units, but none of `keep`, until there is room for one more: those that were used longest ago, and
        those that a pass needs next only behind all others."""
        awaited = set(chain.from_iterable(self.next.values()))
        in_order = sorted(self.here, key=awaited.__contains__)
        for unit in in_order:
            if len(self.here) < self.most:
                return
            if unit not in keep:
                self.free(unit)

    def free(self, unit: str) -> None:
        arrival = self.here.pop(unit)
        arrival.wait(self.spans, self.arrives)
        self.release(unit)
        readers = arrival.reads_so_far() if self.memory.outlives_units else ()
        self.memory.take_back(unit, self.tensors_of(unit), readers)

    def free_all(self) -> None:
        """What is here no longer holds."""
        self.in_use.clear()
        self.next.clear()
        for unit in list(self.here):
            self.free(unit)
