"""The step as one graph: a function of buffers at fixed addresses, captured once and replayed with other contents.

    steps     1      2      3      4                    5        ...
    host      eager  eager  eager  captures, replays    replays  ...
    kernels   are compiled and tuned in eager steps

What is captured reads its batch from `StaticBatch` and its numbers from scalars on the device, never from Python, and
leaves its results at the same addresses in every replay. A batch of another form is captured anew.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.anatomy.tape_obstacles import tape_obstacles
from moefold.config.errors import RunFailure, UserError
from moefold.config.run import Config
from moefold.data.loader import Batch
from moefold.layout.axes import World
from moefold.memory.shared_replay import SharedTapeRecorder, one_thread
from moefold.memory.tape import TapeRecorder

WARM_UP_STEPS = 3  # the first makes what is made once, such as FP8 copies of weights that later steps rewrite
OBSTACLES_HINT = ", and see `moefold explain` for what stands in the way"
TensorForm = tuple[str, torch.Size, torch.dtype]  # name, shape and dtype
BatchForm = list[TensorForm]

T = TypeVar("T")
Replay = Callable[[], None]
Work = Callable[[], T]
Recorded = tuple[T, Replay | str]  # or why the work, which has run, cannot be replayed
NamedTensors = dict[str, Tensor]


class Recorder(Protocol):
    """What runs and captures work: `run` before the capture, `record` to capture. Work that is captured has not run
    until it is replayed."""

    def run(self, work: Work[T]) -> T: ...

    def record(self, work: Work[T]) -> Recorded[T]: ...


class PooledRecorder(Recorder, Protocol):
    """A recorder whose work shares memory: what is recorded later may reuse what earlier work needs while it runs."""

    def with_own_pool(self) -> Recorder: ...


class CudaRecorder:
    """CUDA graphs. Eager steps run on the stream of the capture, so that autograd's nodes belong to no other stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Work[T]) -> T:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = work()
        current.wait_stream(self.stream)
        return result

    def record(self, work: Work[T]) -> Recorded[T]:
        gc.collect()  # what dead cycles hold would stay beside the graph's memory
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # for the memory of the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            result = capture_work(graph, work, "memory.graphs = whole: the step", OBSTACLES_HINT)
        return result, graph.replay


def record_for_replay(recorder: Recorder, work: Work[T]) -> tuple[T, Replay]:
    """The result of work, and its replay."""
    result, replay = recorder.record(work)
    if isinstance(replay, str):
        raise RunFailure(f"work that must be replayed cannot be recorded: {replay}")
    return result, replay


class PoolRecorder(CudaRecorder):
    """CUDA graphs that share one pool of memory, captured while work runs: on the stream of `run`, without a wait for
    the device. What one of them needs while it runs may lie where a later one keeps its results, so they are replayed
    in the order of their capture."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.pool = torch.cuda.graph_pool_handle()

    def with_own_pool(self) -> PoolRecorder:
        other = copy(self)  # on the same stream
        other.pool = torch.cuda.graph_pool_handle()
        return other

    def record(self, work: Work[T]) -> Recorded[T]:
        graph = torch.cuda.CUDAGraph()
        result = capture_work(graph, work, "memory.graphs = static: a step of the model", pool=self.pool)
        return result, graph.replay


class Capture(Protocol):
    """What begins and ends a capture: a CUDA graph."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...

    def capture_end(self) -> None: ...


def capture_work(graph: Capture, work: Work[T], what: str, hint: str = "", pool: Any = None) -> T:
    """Capture work on the present stream. Other threads, such as that of a checkpoint, may go on with what a capture
    forbids to its own thread. `what` is captured, and `hint`: the words of a failure. Want of memory is no failure of
    the capture, and is told as everywhere."""
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        with ending_capture(graph):
            return work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise capture_failure(what, error, hint) from error


@contextmanager
def ending_capture(graph: Capture) -> Iterator[None]:
    """End a capture behind its work. Work that fails may have spoilt it, so that its end fails too: the work's error is
    the one that says why."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


def capture_failure(what: str, error: RuntimeError, hint: str = "") -> RunFailure:
    return RunFailure(f"{what} could not be captured: {error}; set memory.graphs to none{hint}")


class StaticBatch:
    """A batch in buffers of its own, which every further batch of the same form is copied to. The number of its first
    sequence is on the device too."""

    def __init__(self, batch: Batch):
        self.tensors: NamedTensors = {}
        tensors = tensors_of_batch(batch)
        for name, x in tensors.items():
            self.tensors[name] = torch.empty_like(x)
        tokens_BS = self.tensors["tokens"]
        labels_BS = self.tensors["labels"]
        begins_BS = self.tensors.get("begins")
        imposed: dict[int, Tensor] = {}
        for layer in batch.imposed:
            name = imposed_name(layer)
            imposed[layer] = self.tensors[name]
        self.first = torch.zeros((), dtype=torch.int64, device=tokens_BS.device)
        filled_B = self.tensors.get("filled")
        self.batch = Batch(tokens_BS, labels_BS, self.first, begins_BS, imposed, filled_B)

    def fill(self, batch: Batch) -> None:
        tensors = tensors_of_batch(batch)
        for name, x in tensors.items():
            buffer = self.tensors[name]
            buffer.copy_(x)
        self.first.fill_(batch.first)


def tensors_of_batch(batch: Batch) -> NamedTensors:
    tensors: NamedTensors = {}
    tensors["tokens"] = batch.tokens_BS
    tensors["labels"] = batch.labels_BS
    if batch.begins_BS is not None:
        tensors["begins"] = batch.begins_BS
    if batch.filled_B is not None:
        tensors["filled"] = batch.filled_B
    for layer, ids_BSK in batch.imposed.items():
        name = imposed_name(layer)
        tensors[name] = ids_BSK
    return tensors


def imposed_name(layer: int) -> str:
    return f"experts of layer {layer}"


def form_of_batch(batch: Batch) -> BatchForm:
    tensors = tensors_of_batch(batch)
    forms: BatchForm = []
    for name, x in tensors.items():
        form = (name, x.shape, x.dtype)
        forms.append(form)
    return forms


class Taken(NamedTuple, Generic[T]):
    """What a step gave, and whether it was replayed."""

    outputs: T
    replayed: bool


@dataclass
class Captured(Generic[T]):
    outputs: T
    replay: Replay


class StepGraph(Generic[T]):
    """The graph of a run's step for batches of one form. `compute` is the step as a function of a batch; all else that
    it reads and writes stays at its address. `around_observed`: a context of steps that are neither captured nor
    replayed; `remarks`: what a run has to tell of its replays."""

    around_observed: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, recorder: Recorder, warm_up_steps: int = WARM_UP_STEPS):
        self.recorder = recorder
        self.warm_up_steps = warm_up_steps
        self.remarks: list[str] = []
        self.form: BatchForm | None = None
        self.inputs: StaticBatch | None = None
        self.captured: Captured[T] | None = None
        self.eager_steps = 0
        self.obstacle = ""  # why a step could not be recorded; all further ones are eager

    def fits(self, batch: Batch) -> bool:
        return self.form == form_of_batch(batch)

    def captures_next(self, batch: Batch) -> bool:
        """Whether the step on this batch will be captured."""
        if self.captured is not None or self.obstacle:
            return False
        is_warm = self.eager_steps >= self.warm_up_steps
        return is_warm and self.fits(batch)

    def begin_form(self, batch: Batch) -> None:
        """Forget the graph, and begin to warm up for batches of this form."""
        self.captured = None  # its memory first
        self.inputs = StaticBatch(batch)
        self.form = form_of_batch(batch)
        self.eager_steps = 0

    def forget(self) -> None:
        """Forget the graph: state that it reads was replaced."""
        self.form = None
        self.captured = None

    def take_step(self, batch: Batch, compute: Callable[[Batch], T]) -> Taken[T]:
        if not self.fits(batch):
            self.begin_form(batch)
        assert self.inputs is not None
        self.inputs.fill(batch)
        compute_static = partial(compute, self.inputs.batch)
        if self.obstacle or self.eager_steps < self.warm_up_steps:
            self.eager_steps += 1
            outputs = self.recorder.run(compute_static)
            return Taken(outputs, False)
        if self.captured is None:
            outputs, replay = self.recorder.record(compute_static)
            if isinstance(replay, str):
                self.obstacle = replay
                return Taken(outputs, False)
            self.captured = Captured(outputs, replay)
        self.captured.replay()
        return Taken(self.captured.outputs, True)


def require_own_gpus(world: World) -> None:
    if world.size > 1 and dist.get_backend(world.everyone.group) == "gloo":
        raise UserError(
            f"memory.graphs = whole: {world.size} ranks share GPUs, over gloo, whose messages cannot be captured; "
            "expected a GPU for each rank; set memory.graphs to none"
        )


def make_step_graph(config: Config, world: World) -> StepGraph[Any] | None:
    """The graph of a run by `memory.graphs`, if it has one of the whole step, or on a CPU its tape."""
    device = world.device
    if config.memory.graphs == "whole":
        require_own_gpus(world)
        recorder = CudaRecorder(device)
        return StepGraph(recorder)
    if not tape_obstacles(config, world.size):
        return shared_step_graph() if config.memory.tape_processes > 1 else StepGraph(TapeRecorder())
    return None


def shared_step_graph() -> StepGraph[Any]:
    """A tape that two processes replay, and steps of one thread."""
    recorder = SharedTapeRecorder()
    graph: StepGraph[Any] = StepGraph(recorder)
    graph.around_observed = one_thread
    graph.remarks = recorder.remarks
    return graph
