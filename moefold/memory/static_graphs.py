"""Graphs of static steps: forward and backward of a step are a CUDA graph each, captured once and replayed.

    forward    attend  route  | plan dispatch experts combine |  attend  route  | ...
               graph          | launched by the host          |  graph          |
    backward   graph          | launched by the host          |  graph          |

A graph reads and writes memory at fixed addresses. A microbatch between its forward and its backward has a slot of
each captured step: the memory of its inputs, its outputs and what backward needs. A step has as many slots as
microbatches are in flight at once, each captured when it is first needed.

    inputs                 copied to the slot, or to memory that all layers share where backward does not read them;
                           outputs of another captured step are read where they are
    gradients of outputs   copied to memory that all layers share
    gradients of inputs    copied in the graph to memory that all layers share: one microbatch runs backward at a time
    gradients of weights   added in the graph to sums at fixed addresses; whether a gradient is the first of its sum
                           decides which of two graphs runs. Those that wait for a gap are graphs of their own
    copies of weights      in another format: renewed in their places before a replay, where weights have moved

All graphs of a slot's pass, from the first captured step to the last and back, share one pool of memory: they are
replayed in the order of their capture, by one microbatch at a time. Later ones may keep results where earlier ones had
what they need only while they run, so graphs of two microbatches in flight must not share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from moefold.anatomy.captured_steps import CAPTURED_READS, name_of_run, runs_of_steps
from moefold.anatomy.step_specs import StepSpec
from moefold.layout.deferred_wgrad import (
    DeferredGradient,
    DeferredWork,
    deferring_weight_grads,
    deliver_gradient,
    open_queue,
)
from moefold.layout.gradient_sink import FixedSum, sink_of, underlying_parameter
from moefold.layout.weight_copies import CopyUses, noting_copies
from moefold.memory.graphs import WARM_UP_STEPS, PooledRecorder, PoolRecorder, Recorder, Replay, Work, record_for_replay
from moefold.memory.offload import OffloadingSteps
from moefold.memory.recompute import noting_calls
from moefold.memory.stash import StashingSteps
from moefold.model.steps import Carry, Step, StepRewrite, StepRun, Steps, drop_from_carry, run_step_sequence
from moefold.model.transformer import Transformer

T = TypeVar("T")
Leaves = list[Any]
Tensors = Sequence[Tensor]
Gradients = Sequence[Tensor | None]
LeafForm = tuple[object, ...]
Wait = Callable[[], None]


def wait_for_nothing() -> None: ...


class ArrivingWeights(Protocol):
    """Weights whose new values may be under way from other ranks (shard/publish.py). A graph cannot wait for them."""

    def waiter_for(self, parameters: Iterable[Tensor]) -> Wait:
        """What waits for the present values of these parameters."""
        ...

    def await_all_buckets(self) -> None: ...


class WeightsInPlace:
    """Weights of one rank."""

    def waiter_for(self, parameters: Iterable[Tensor]) -> Wait:
        return wait_for_nothing

    def await_all_buckets(self) -> None: ...


# ---- inputs of a step ----

REPLAYED = "replayed_steps"  # the entry of the carry: how many of the next steps a replay has done already


class JoinedSteps:
    """Neighbouring steps that are captured as one, by the names of all."""

    def __init__(self, steps: Steps):
        self.steps = steps
        self.layer = steps[0].layer
        specs = [step.spec for step in steps]
        self.name = name_of_run(specs)
        self.reads: dict[str, None] = {}  # distinct entries, in order
        for spec in specs:
            self.reads |= dict.fromkeys(CAPTURED_READS[spec.name])

    def run(self, carry: Carry) -> Carry:
        return run_step_sequence(self.steps, carry)

    def run_first(self, carry: Carry) -> Carry:
        """The first step alone, without a graph."""
        return self.steps[0].run(carry)


def run_unless_replayed(run: StepRun, carry: Carry) -> Carry:
    """Run a step, unless a graph that began with a step before it has done its work."""
    left = carry.get(REPLAYED, 0)
    if left == 0:
        return run(carry)
    if left == 1:
        return drop_from_carry(carry, REPLAYED)
    return carry | {REPLAYED: left - 1}


class GivenInputs(NamedTuple):
    """What a captured step reads: the leaves of its entries of the carry, and of those of the token shard that differ
    from one microbatch to the next."""

    leaves: Leaves
    structure: TreeSpec
    shard: Any

    @classmethod
    def of_steps(cls, steps: JoinedSteps, carry: Carry) -> GivenInputs:
        entries: Carry = {}
        for name in steps.reads:
            entries[name] = carry[name]
        imposed = entries.get("imposed")
        if imposed:
            entries["imposed"] = {layer: ids for layer, ids in imposed.items() if layer == steps.layer}
        shard = carry["token_shard"]
        of_shard = (shard.first, shard.begins_BS, shard.filled_B)
        leaves, structure = tree_flatten((entries, of_shard))
        return cls(leaves, structure, shard)

    def carry_of(self, leaves: Leaves) -> Carry:
        """The entries, with these leaves in place of those given."""
        entries, of_shard = tree_unflatten(leaves, self.structure)
        first, begins_BS, filled_B = of_shard
        shard = replace(self.shard, first=first, begins_BS=begins_BS, filled_B=filled_B)
        return entries | {"token_shard": shard}

    def form(self) -> LeafForm:
        shard = self.shard
        forms = [form_of_leaf(leaf) for leaf in self.leaves]
        return (str(self.structure), shard.sequences, shard.length, shard.cp.size, *forms)

    @property
    def needs_gradient(self) -> bool:
        return any(needs_gradient(leaf) for leaf in self.leaves)


NUMBER_FORM: LeafForm = (torch.Size(()), (), torch.int64, False)  # a number of the host becomes one of the device


def form_of_leaf(leaf: Any) -> LeafForm:
    if isinstance(leaf, int):
        return NUMBER_FORM
    if not isinstance(leaf, Tensor):
        return (leaf,)
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad


def needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def address_of(x: Tensor) -> int:
    return x.data_ptr()


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


# ---- memory ----


@dataclass(eq=False)
class PassPool:
    """The pool of the graphs of a microbatch in flight. `waiting`: how many of its backwards have weight gradients that
    wait. What they read may lie where forward has what it needs only while it runs: no pass begins before."""

    recorder: Recorder
    waiting: int = 0


class CapturedWork(NamedTuple, Generic[T]):
    result: T
    replay: Replay


def renew_copies(copies: CopyUses) -> None:
    for use in copies.values():
        use.renew()


def replay_with_copies(copies: CopyUses, replay: Replay) -> None:
    """Replay a graph that reads these copies of weights, which hold the weights' present values."""
    renew_copies(copies)
    replay()


class GraphMemory:
    """Memory of graphs beside their pool. `standing`: addresses of tensors that stay where they are. `shared`: buffers
    that hold nothing from one graph to the next but what is read at once: the same for all layers and slots, by the
    name of their step, their role and their form. `pools`: by the address of the number of a microbatch's first
    sequence, which the first captured step of a pass has put there."""

    def __init__(self, device: torch.device, recorder: PooledRecorder):
        self.device = device
        self.recorder = recorder
        self.copies: CopyUses = {}  # of weights, in other formats, that the model asks for
        self.weight_recorder = recorder.with_own_pool()  # of weight gradients that wait, which run in any order
        self.pools: dict[int, PassPool] = {}
        self.standing: set[int] = set()
        self.shared: dict[LeafForm, Tensor] = {}

    def empty_buffer(self, leaf: Tensor | int) -> Tensor:
        """Memory of a leaf's form. A number of the host has one on the device."""
        if isinstance(leaf, int):
            return torch.zeros((), dtype=torch.int64, device=self.device)
        return torch.empty_like(leaf, requires_grad=False)

    def record(self, recorder: Recorder, work: Work[T]) -> CapturedWork[T]:
        """Capture work that reads copies of weights where they are, and does not make them."""
        renew_copies(self.copies)
        copies: CopyUses = {}
        with noting_copies(copies):
            result, replay = record_for_replay(recorder, work)
        for use in copies.values():
            use.hold_in_place()
        return CapturedWork(result, partial(replay_with_copies, copies, replay))

    def forget(self, addresses: set[int]) -> None:
        """Forget tensors whose graphs are forgotten."""
        self.standing -= addresses
        for address in addresses:
            self.pools.pop(address, None)

    def shared_buffer(self, step: str, role: str, place: int, like: Tensor) -> Tensor:
        key = buffer_key(step, role, place, like)
        if key not in self.shared:
            self.shared[key] = self.empty_buffer(like)
        return self.shared[key]

    def pool_of(self, first: Tensor | int) -> PassPool:
        """The pool of the pass that a microbatch is in; a new one if the pass begins."""
        if self.stands(first):
            return self.pools[address_of(first)]
        recorder = self.recorder.with_own_pool()
        return PassPool(recorder)

    def stands(self, leaf: Any) -> TypeGuard[Tensor]:
        return isinstance(leaf, Tensor) and address_of(leaf) in self.standing


def buffer_key(step: str, role: str, place: int, like: Tensor | int) -> LeafForm:
    form = form_of_leaf(like)
    return step, role, place, *form[:3]


def fill_buffer(buffer: Tensor, leaf: Tensor | int) -> None:
    if isinstance(leaf, int):
        buffer.fill_(leaf)
    elif address_of(buffer) != address_of(leaf):
        buffer.copy_(leaf.detach())


# ---- one microbatch in flight ----


class CapturedGradients(NamedTuple):
    """What a captured backward leaves: gradients of the inputs, and work that was deferred in it."""

    of_inputs: list[Tensor | None]
    deferred: list[DeferredWork]


class BackwardGraph:
    """The backward of a slot for given gradients: buffers of those of the outputs, and gradients of the inputs.
    `deferred`: weight gradients that wait, which are further graphs, by which of their sums were begun."""

    def __init__(self, buffers: list[Tensor | None], captured: CapturedGradients, replay: Replay):
        self.buffers = buffers
        self.gradients = captured.of_inputs
        self.replay = replay
        self.deferred = [work for work in captured.deferred if isinstance(work, DeferredGradient)]
        assert len(self.deferred) == len(captured.deferred), "a captured step defers weight gradients alone"
        self.waiting: dict[int, Tensor] = {}  # parameters by identity
        for work in self.deferred:
            parameter = underlying_parameter(work.weight)
            self.waiting[id(parameter)] = parameter
        self.sums = [fixed_sum_of(parameter) for parameter in self.waiting.values()]
        self.weight_graphs: dict[object, Replay] = {}

    def run(self, gradients: Gradients) -> list[Tensor | None]:
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            if buffer is not None and gradient is not None:
                fill_buffer(buffer, gradient)
        self.replay()
        return self.gradients

    def run_deferred(self, recorder: Recorder) -> None:
        """Add the weight gradients that wait to their sums."""
        has_sums = tuple(total.holds_sum() for total in self.sums)
        if has_sums not in self.weight_graphs:
            _, replay = record_for_replay(recorder, self.add_weight_gradients)
            self.weight_graphs[has_sums] = replay
        replay = self.weight_graphs[has_sums]
        replay()
        for parameter, total in zip(self.waiting.values(), self.sums, strict=True):
            total.note_added()
            deliver_gradient(parameter, None)

    def add_weight_gradients(self) -> None:
        for work in self.deferred:
            with torch.no_grad():
                gradient = work.compute_gradient()
            if gradient is not None:
                total = fixed_sum_of(work.weight)
                total.add(gradient)


class GraphSlot:
    """A captured step of one microbatch in flight: its static inputs and outputs, and its graphs."""

    def __init__(self, steps: JoinedSteps, given: GivenInputs, memory: GraphMemory):
        self.name = steps.name
        self.memory = memory
        first = given.shard.first
        self.begins_pass = not memory.stands(first)
        self.pool = memory.pool_of(first)
        self.recorder = self.pool.recorder
        self.is_taken = False
        self.linked: dict[int, int] = {}  # by place: the address of an input that stands
        self.buffers: dict[int, Tensor] = {}  # by place: those of other inputs
        self.inputs = self.place_inputs(given)
        self.differentiable = [place for place, leaf in enumerate(given.leaves) if needs_gradient(leaf)]
        self.fill(given)
        self.kept: set[int] = set()  # storages that backward reads
        carry, self.replay_forward = memory.record(self.recorder, partial(self.compute, steps, given))
        self.hold_outputs(carry)
        self.keeps_shared = self.share_buffers()
        self.parameters = trained_parameters(self.outputs, self.sources)
        self.sums = [fixed_sum_of(parameter) for parameter in self.parameters]
        self.backward_graphs: dict[object, BackwardGraph] = {}

    # ---- capture ----

    def place_inputs(self, given: GivenInputs) -> Leaves:
        """The inputs as leaves of a graph of their own."""
        inputs: Leaves = []
        for place, leaf in enumerate(given.leaves):
            if not isinstance(leaf, (Tensor, int)):
                inputs.append(leaf)
                continue
            if self.memory.stands(leaf):
                self.linked[place] = address_of(leaf)
                static = leaf.detach()
            else:
                key = buffer_key(self.name, "input", place, leaf)
                buffer = self.memory.shared.get(key)
                if buffer is None:
                    buffer = self.memory.empty_buffer(leaf)
                self.buffers[place] = buffer
                static = buffer.data  # copies to the buffer are no changes that autograd counts
            static.requires_grad_(needs_gradient(leaf))
            inputs.append(static)
        return inputs

    def compute(self, steps: JoinedSteps, given: GivenInputs) -> Carry:
        carry = given.carry_of(self.inputs)
        self.given_entries = {name: id(value) for name, value in carry.items()}
        self.shard = carry["token_shard"]
        with torch.enable_grad(), saved_tensors_hooks(self.note_kept, as_it_is), noting_calls() as self.rebuilt:
            carry = steps.run(carry)
        for call in self.rebuilt:
            call.policy.promises.withdraw(call)  # outputs of the step stay in its slot
        return carry

    def note_kept(self, x: Tensor) -> Tensor:
        self.kept.add(storage_of(x))
        return x if x.is_leaf else x.detach()  # an output would hold its node, which holds the output

    def hold_outputs(self, carry: Carry) -> None:
        """Keep what the step has made. A tensor that the carry holds twice stays one."""
        made = {name: value for name, value in carry.items() if self.given_entries.get(name) != id(value)}
        self.dropped = [name for name in self.given_entries if name not in carry]
        self.leaves, self.structure = tree_flatten(made)
        numbers: dict[int, int] = {}
        self.outputs: list[Tensor] = []  # those with gradients
        self.output_places: dict[int, int] = {}  # by place in the leaves: the number of the output
        for place, leaf in enumerate(self.leaves):
            if needs_gradient(leaf):
                number = numbers.setdefault(id(leaf), len(numbers))
                if number == len(self.outputs):
                    self.outputs.append(leaf)
                self.output_places[place] = number
        of_shard = (self.shard.first, self.shard.begins_BS, self.shard.filled_B)
        tensors = [leaf for leaf in (*self.leaves, *of_shard) if isinstance(leaf, Tensor)]
        self.kept |= set(map(storage_of, tensors))
        self.standing = set(map(address_of, tensors)) - self.memory.standing
        self.memory.standing |= self.standing
        self.memory.pools[address_of(self.shard.first)] = self.pool

    def share_buffers(self) -> bool:
        """Share the buffers that nothing reads behind forward. Whether one that was shared is read, which makes this
        slot useless: the next one will not share it."""
        shared = self.memory.shared
        keeps_shared = False
        for place, buffer in self.buffers.items():
            key = buffer_key(self.name, "input", place, buffer)
            if storage_of(buffer) not in self.kept:
                shared[key] = buffer
            elif shared.pop(key, None) is not None:
                keeps_shared = True
        return keeps_shared

    @property
    def sources(self) -> list[Tensor]:
        """The inputs that have gradients."""
        return [self.inputs[place] for place in self.differentiable]

    # ---- forward ----

    def fits(self, given: GivenInputs) -> bool:
        """Whether the slot is free, and inputs that are read where they are lie there."""
        if self.is_taken or (self.begins_pass and self.pool.waiting):
            return False
        leaves = given.leaves
        for place, address in self.linked.items():
            leaf = leaves[place]
            if not isinstance(leaf, Tensor) or address_of(leaf) != address:
                return False
        return True

    def fill(self, given: GivenInputs) -> None:
        for place, buffer in self.buffers.items():
            fill_buffer(buffer, given.leaves[place])

    def run(self, given: GivenInputs, carry: Carry) -> Carry:
        """The step on these inputs: the carry behind it."""
        self.is_taken = True
        tensors = [given.leaves[place] for place in self.differentiable]
        outputs = ReplayedStep.apply(self, given, *tensors, *self.parameters)
        leaves = list(self.leaves)
        for place, number in self.output_places.items():
            leaves[place] = outputs[number]  # pyright: ignore[reportOptionalSubscript]
        made = tree_unflatten(leaves, self.structure)
        kept = {name: value for name, value in carry.items() if name not in self.dropped}
        return kept | made | {"token_shard": self.shard}

    # ---- backward ----

    def run_backward(self, gradients: Gradients) -> list[Tensor | None]:
        """The gradients of the inputs. Those of weights are added to their sums, now or when the queue is run."""
        queue = open_queue()
        is_given = tuple(gradient is not None for gradient in gradients)
        has_sums = tuple(total.holds_sum() for total in self.sums)
        key = (queue is None, is_given, has_sums)
        graph = self.backward_graphs.get(key)
        if graph is None:
            graph = self.capture_backward(gradients, queue is not None)
            self.backward_graphs[key] = graph
        found = graph.run(gradients)
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            if id(parameter) not in graph.waiting:
                total.note_added()
        if queue is not None and graph.deferred:
            self.pool.waiting += 1
            queue.append(partial(self.run_deferred, graph))
        else:
            self.is_taken = False
        return found

    def run_deferred(self, graph: BackwardGraph) -> None:
        graph.run_deferred(self.memory.weight_recorder)
        self.pool.waiting -= 1
        self.is_taken = False

    def capture_backward(self, gradients: Gradients, defers: bool) -> BackwardGraph:
        """Gradients of outputs that deferred work may read lie in memory of the slot."""
        memory = self.memory
        buffers: list[Tensor | None] = []
        for place, gradient in enumerate(gradients):
            buffer = None
            if gradient is not None:
                if defers:
                    buffer = memory.empty_buffer(gradient)
                else:
                    buffer = memory.shared_buffer(self.name, "gradient of output", place, gradient)
                fill_buffer(buffer, gradient)
            buffers.append(buffer)
        sources = enumerate(self.sources)
        places = [memory.shared_buffer(self.name, "gradient of input", place, x) for place, x in sources]
        compute = partial(self.compute_gradients, buffers, places, defers)
        captured, replay = memory.record(self.recorder, compute)
        return BackwardGraph(buffers, captured, replay)

    def compute_gradients(self, gradients: Gradients, places: Tensors, defers: bool) -> CapturedGradients:
        pairs = zip(self.outputs, gradients, strict=True)
        roots = [(y, dy) for y, dy in pairs if dy is not None]
        outputs = [y for y, _ in roots]
        given = [dy for _, dy in roots]
        sources = self.sources
        wanted = [*sources, *self.parameters]
        deferred: list[DeferredWork] = []
        with deferring_weight_grads(deferred) if defers else nullcontext():
            found = torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
        count = len(sources)
        for total, gradient in zip(self.sums, found[count:], strict=True):
            if gradient is not None:
                total.add(gradient)
        for call in self.rebuilt:
            call.begin_anew()  # for the next graph of this backward
        kept: list[Tensor | None] = []
        for place, gradient in zip(places, found[:count], strict=True):
            kept.append(None if gradient is None else place.copy_(gradient))
        return CapturedGradients(kept, deferred)


def as_it_is(x: Tensor) -> Tensor:
    return x


def fixed_sum_of(parameter: Tensor) -> FixedSum:
    sink = sink_of(parameter)
    total = None if sink is None else sink.total
    assert total is not None, "gradients of captured steps have sums at fixed addresses"
    return total


def trained_parameters(outputs: Tensors, sources: Tensors) -> list[Tensor]:
    """The leaves of a graph other than its inputs."""
    inputs = {id(x) for x in sources}
    found: dict[int, Tensor] = {}
    seen: set[Node] = set()
    remaining: list[Node | None] = [y.grad_fn for y in outputs]
    while remaining:
        node = remaining.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in inputs:
            found[id(leaf)] = leaf
        remaining += [following for following, _ in node.next_functions]
    return list(found.values())


class ReplayedStep(torch.autograd.Function):
    """A captured step as a node. Its backward gives parameters no gradient: their sums have it."""

    @staticmethod
    def forward(ctx: Any, slot: GraphSlot, given: GivenInputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        slot.fill(given)
        slot.replay_forward()
        outputs = [y.detach() for y in slot.outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        slot = ctx.slot
        found = slot.run_backward(gradients)
        return None, None, *found, *(None for _ in slot.parameters)


# ---- all captured steps of a model ----


class CapturedStep:
    """A step, or several neighbours, with its slots, for inputs of one form."""

    def __init__(self, steps: JoinedSteps, graphs: StaticGraphs):
        self.steps = steps
        self.graphs = graphs
        self.form: LeafForm | None = None
        self.slots: list[GraphSlot] = []
        self.wait: Wait = wait_for_nothing
        self.first_step = 0  # that had inputs of this form

    def run(self, carry: Carry) -> Carry:
        """All of the steps by a replay, or the first one without."""
        graphs = self.graphs
        if not graphs.is_open or not torch.is_grad_enabled():
            return self.steps.run_first(carry)
        given = GivenInputs.of_steps(self.steps, carry)
        if not given.needs_gradient:
            return self.steps.run_first(carry)
        form = given.form()
        if form != self.form:
            self.begin_form(form)
        if graphs.steps - self.first_step < graphs.warm_up_steps:
            return self.steps.run_first(carry)
        slot = self.slot_for(given)
        self.wait()
        carry = slot.run(given, carry)
        others = len(self.steps.steps) - 1
        return carry | {REPLAYED: others} if others else carry

    def begin_form(self, form: LeafForm) -> None:
        """Forget the graphs, and begin to warm up for inputs of this form."""
        self.forget()
        self.form = form
        self.first_step = self.graphs.steps

    def forget(self) -> None:
        for slot in self.slots:
            self.graphs.memory.forget(slot.standing)
        self.slots = []
        self.form = None

    def slot_for(self, given: GivenInputs) -> GraphSlot:
        for slot in self.slots:
            if slot.fits(given):
                return slot
        graphs = self.graphs
        memory = graphs.memory
        graphs.weights.await_all_buckets()
        slot = GraphSlot(self.steps, given, memory)
        if slot.keeps_shared:
            memory.forget(slot.standing)
            slot = GraphSlot(self.steps, given, memory)
        self.slots.append(slot)
        self.wait = graphs.weights.waiter_for(slot.parameters)
        return slot


def captured_neighbours(steps: Steps) -> list[Steps]:
    """The steps of all layers in runs, of which those of several are captured as one."""
    runs: list[Steps] = []
    for _, of_layer in groupby(steps, attrgetter("layer")):
        runs += runs_of_steps(of_layer, spec_of_step)
    return runs


def spec_of_step(step: Step) -> StepSpec:
    return step.spec


class StaticGraphs:
    """The graphs of a run's static steps. Steps are captured inside `take_step` alone: what else runs is launched
    anew. `weights`: what a step's parameters are awaited by, before each replay."""

    def __init__(self, recorder: PooledRecorder, device: torch.device, warm_up_steps: int = WARM_UP_STEPS):
        self.recorder = recorder
        self.memory = GraphMemory(device, recorder)
        self.warm_up_steps = warm_up_steps
        self.weights: ArrivingWeights = WeightsInPlace()
        self.captured: list[CapturedStep] = []
        self.steps = 0
        self.is_open = False

    def capture_steps(self, steps: Steps) -> Steps:
        """The step list in which static steps are captured."""
        captured: Steps = []
        for run in captured_neighbours(steps):
            first, *others = run
            if first.spec.name in CAPTURED_READS:
                joined = JoinedSteps(run)
                own = CapturedStep(joined, self)
                self.captured.append(own)
                first = replace(first, run=own.run)
            captured.append(first)
            for step in others:
                unless_replayed = partial(run_unless_replayed, step.run)
                captured.append(replace(step, run=unless_replayed))
        return captured

    def take_step(self, compute: Callable[[], T], is_observed: bool = False) -> T:
        """A training step, with graphs unless something looks into it. Slots of a step that did not end are free."""
        for step in self.captured:
            for slot in step.slots:
                slot.is_taken = False
                slot.pool.waiting = 0
        self.is_open = not is_observed
        try:
            with noting_copies(self.memory.copies):
                result = self.recorder.run(compute)
        finally:
            self.is_open = False
        self.steps += 1
        return result

    def forget(self) -> None:
        """Forget all graphs: state that they read was replaced."""
        for step in self.captured:
            step.forget()

    @property
    def slot_count(self) -> int:
        return sum(len(step.slots) for step in self.captured)


@dataclass(frozen=True)
class CapturingSteps:
    """The rewrite of a step list under which static steps are captured."""

    graphs: StaticGraphs
    rewrite: StepRewrite

    def __call__(self, steps: Steps) -> Steps:
        rewritten = self.rewrite(steps)
        return self.graphs.capture_steps(rewritten)


def attach_static_graphs(model: Transformer, graphs: StaticGraphs) -> None:
    """Capture the static steps of a model, inside what acts on single steps."""
    model.rewrite_steps = capturing_inside(model.rewrite_steps, graphs)


def capturing_inside(rewrite: StepRewrite, graphs: StaticGraphs) -> StepRewrite:
    if isinstance(rewrite, (OffloadingSteps, StashingSteps)):
        inner = capturing_inside(rewrite.rewrite, graphs)
        return replace(rewrite, rewrite=inner)
    return CapturingSteps(graphs, rewrite)


def make_static_graphs(graphs: str, model: Transformer, device: torch.device) -> StaticGraphs | None:
    """The graphs of a run's static steps by `memory.graphs`, if it has such."""
    if graphs != "static":
        return None
    recorder = PoolRecorder(device)
    static_graphs = StaticGraphs(recorder, device)
    attach_static_graphs(model, static_graphs)
    return static_graphs
