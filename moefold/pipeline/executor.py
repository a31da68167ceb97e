"""The pipeline executor: runs this rank's part of a program slot by slot (forwards, data and weight gradients).

What is sent and received follows from the program alone. Between stages one tensor is sent, the cargo: the residual
stream and, behind multi-token prediction layers, the streams that they set aside. In a paired slot the steps of two
passes are interleaved, so that the all-to-all of one runs while the other computes. In every slot, steps that need no
exchange of their own microbatch run beside it: shared experts.

N streams of T tokens of width D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.stage_contents import Stage, pipeline_program, pipeline_stages, rank_of_each_stage
from moefold.comm.lanes import Lanes
from moefold.comm.p2p import PipelineChannel
from moefold.config.run import Config
from moefold.data.loader import Batch
from moefold.dispatch.symmetric import by_collectives
from moefold.layout.axes import World
from moefold.memory.offload import bring_back_ahead
from moefold.model.moe.layer import symmetric_dispatchers
from moefold.model.moe.row_chunks import in_row_chunks
from moefold.model.norm import ResidualStream
from moefold.model.step_borders import ObservedSteps
from moefold.model.steps import Around, Carry, PassKey, Step, StepRewrite, run_step_sequence
from moefold.model.transformer import Transformer
from moefold.model.unit_window import ComingPass, UnitWindow
from moefold.observe.trace import SpanRecorder, StepTracer
from moefold.pipeline.bound_program import BoundProgram, bind_program, forward_program
from moefold.pipeline.inbox import Inbox
from moefold.pipeline.last_gradients import StagesUsing, parameters_with_several_gradients, stages_using_parameters
from moefold.pipeline.passage import Passage
from moefold.pipeline.segments import Segments, one_segment, segments_for_pairing, segments_of_one_microbatch
from moefold.pipeline.step_costs import StepCosts
from moefold.pipeline.strand_order import Strand, StrandPiece, backward_strand
from moefold.pipeline.strand_runner import BackwardWork, DeferredQueue, ForwardWork, StrandRunner, StrandWork
from moefold.schedule.program import PipelineOp, Program, Slot, is_paired
from moefold.shard.gradients import Gradients

StepListKey = tuple[int, bool, StepRewrite]  # stage, whether the model trains, how memory policies join steps
CutKey = tuple[StepListKey, bool]  # the last: whether the stage is cut for paired slots
CarryReader = Callable[[Carry], None]
Streams = list[Tensor]


class CutStage(NamedTuple):
    """A stage's steps in segments, with its strands: of a forward, of a backward, and of a backward whose weight
    gradients wait."""

    segments: Segments
    forward: Strand
    backward: Strand
    deferring: Strand


class Executor:
    """Trains and evaluates the stages that this rank holds. `around`: observers of every step (model/steps.py)."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        gradients: Gradients,
        world: World,
        spans: SpanRecorder,
        around: Sequence[Around] = (),
    ):
        self.config = config
        self.model = model
        self.gradients = gradients
        self.world = world
        self.spans = spans
        self.around = tuple(around)
        self.stages = pipeline_stages(config)
        self.homes = rank_of_each_stage(config)
        pipe = world.axis("pipe")
        self.rank = pipe.index
        self.pipe = PipelineChannel(pipe)
        self.lanes = Lanes(world.device)
        device = world.device.type
        node_size = world.node_size
        self.costs = StepCosts(config, device, node_size)
        self.users = stages_using_parameters(model)
        self.several_gradients = parameters_with_several_gradients(model)
        self.symmetric = symmetric_dispatchers(model)
        # Made once, when first asked for: the same in every step of a run.
        self.train_programs: dict[int, BoundProgram] = {}
        self.forward_programs: dict[int, BoundProgram] = {}
        self.train_steps: dict[StepListKey, list[Step]] = {}
        self.forward_steps: dict[StepListKey, list[Step]] = {}
        self.cut_stages: dict[CutKey, CutStage] = {}

    def train(self, parts: Sequence[Batch], weights: LossWeights) -> Tensor:
        """Forward and backward of all microbatches; gradients are added to their buckets. Returns the summed losses of
        microbatches whose last stage is here: zeros on ranks without the last stage."""
        program = self.train_program(len(parts))
        step = StepRun(self, program, parts, weights)
        losses = step.run()
        for dispatcher in self.symmetric:
            dispatcher.end_turns()
        return losses

    @torch.no_grad()
    def forward_only(self, parts: Sequence[Batch], finish: CarryReader) -> None:
        """Forward only. The rank with the last stage calls `finish(carry)` once per microbatch."""
        program = self.forward_program(len(parts))
        step = StepRun(self, program, parts, finish=finish)
        with by_collectives(self.symmetric):
            step.run()

    def require_peers(self) -> None:
        """Fail if a rank gave no signal in an exchange of rows. The host waits for nothing here: what a step left is
        known once its report has been read."""
        for dispatcher in self.symmetric:
            dispatcher.arena.require_peers()
        self.model.require_peers()

    @contextmanager
    def observed_by(self, *observers: Around) -> Iterator[None]:
        """Call further observers around every step that runs inside."""
        before = self.around
        self.around = (*before, *observers)
        try:
            yield
        finally:
            self.around = before

    def observers_of_pass(self, is_cut: bool) -> tuple[Around, ...]:
        """The observers, and where steps run on two lanes the tracer of the spans, if spans are recorded."""
        if is_cut and self.spans.recording:
            tracer = StepTracer(self.spans)
            return (*self.around, tracer)
        return self.around

    def train_program(self, microbatches: int) -> BoundProgram:
        if microbatches not in self.train_programs:
            program = pipeline_program(self.config, microbatches)
            bound = self.bind(program, self.users)
            self.train_programs[microbatches] = bound
        return self.train_programs[microbatches]

    def forward_program(self, microbatches: int) -> BoundProgram:
        if microbatches not in self.forward_programs:
            program = forward_program(self.homes, microbatches)
            bound = self.bind(program, users={})
            self.forward_programs[microbatches] = bound
        return self.forward_programs[microbatches]

    def bind(self, program: Program, users: StagesUsing) -> BoundProgram:
        return bind_program(program, self.homes, self.rank, users)

    def steps_to_train(self, stage: int) -> list[Step]:
        """A stage's steps, up to the losses if it has them."""
        key = self.step_list_key(stage)
        if key not in self.train_steps:
            contents = self.stages[stage]
            steps = self.model.steps(contents)
            chunks = self.config.parallel.row_chunks
            if chunks > 1:
                steps = in_row_chunks(steps, chunks)
            self.train_steps[key] = steps
        return self.train_steps[key]

    def cut_stage(self, stage: int, is_paired: bool) -> CutStage:
        """A stage's steps to train, cut for passes of paired slots or for others."""
        key = self.step_list_key(stage), is_paired
        if key not in self.cut_stages:
            steps = self.steps_to_train(stage)
            segments = self.cut_steps(steps, is_paired)
            self.cut_stages[key] = self.with_strands(segments)
        return self.cut_stages[key]

    def cut_steps(self, steps: Sequence[Step], is_paired: bool) -> Segments:
        if is_paired:
            return segments_for_pairing(steps)
        if self.world.ep_etp.size > 1:
            return segments_of_one_microbatch(steps)
        return one_segment(steps)

    def with_strands(self, segments: Segments) -> CutStage:
        pieces: list[StrandPiece] = []
        for segment in segments:
            specs = [step.spec for step in segment.steps]
            seconds = sum(map(self.costs.seconds, specs))
            piece = StrandPiece(segment.lane, seconds, segment.needs)
            pieces.append(piece)
        forward = tuple(pieces)
        # A backward has two products for each of the forward's: of the input's gradient and of the weight's.
        backward = backward_strand(forward, 2.0)
        deferring = backward_strand(forward, 1.0)
        return CutStage(segments, forward, backward, deferring)

    def steps_to_streams(self, stage: int) -> list[Step]:
        """A stage's steps without the losses."""
        key = self.step_list_key(stage)
        if key not in self.forward_steps:
            contents = self.stages[stage]
            steps = self.model.body(contents)
            self.forward_steps[key] = steps
        return self.forward_steps[key]

    def step_list_key(self, stage: int) -> StepListKey:
        model = self.model
        return stage, model.training, model.rewrite_steps


class LossWeights(NamedTuple):
    """Factors of the objective's sums in a step's gradient, such as those of the model's own and of each MTP layer's
    cross-entropy, and of the balance losses."""

    losses_1M: Tensor
    balance: Tensor

    def scaled_by(self, factor: Tensor) -> LossWeights:
        losses_1M = self.losses_1M * factor
        balance = self.balance * factor
        return LossWeights(losses_1M, balance)


class StepRun:
    """One run of a program over one batch. With `finish` it is forward only."""

    def __init__(
        self,
        executor: Executor,
        program: BoundProgram,
        parts: Sequence[Batch],
        weights: LossWeights | None = None,
        finish: CarryReader | None = None,
    ):
        self.executor = executor
        self.program = program
        self.parts = parts
        self.weights = weights
        self.finish = finish
        messages = program.messages
        self.inbox = Inbox(messages, executor.pipe, self.empty_cargo)
        self.local_cargo: dict[PipelineOp, Tensor] = {}  # between stages of this rank
        self.passages: dict[PassKey, Passage] = {}
        self.input_streams: dict[PassKey, Streams] = {}
        self.deferred_work: dict[PassKey, DeferredQueue] = {}
        sums = executor.model.objective.sums
        device = executor.world.device
        self.losses_1M = torch.zeros(sums, dtype=torch.float64, device=device)

    def run(self) -> Tensor:
        slots = self.program.slots
        gradients = self.executor.gradients
        for number, slot in enumerate(slots):
            # Receives of this slot and of the next are posted before the slot's work begins.
            for near in slots[number : number + 2]:
                self.inbox.expect(near)
                self.bring_back_offloaded(near)
            self.announce_passes(slots[number + 1 : number + 2])
            last_gradients = self.program.last_gradients
            finished = last_gradients.get(number, set())
            early = self.finished_by_one_gradient(slot, finished)
            if early:
                gradients.expect_last_gradients(early)
            self.run_slot(slot)
            if finished:
                gradients.mark_complete(finished - early)
        self.executor.pipe.flush()
        return self.losses_1M

    def finished_by_one_gradient(self, slot: Slot, finished: set[str]) -> set[str]:
        """Those of the parameters that get one gradient in the slot, the last: each bucket is reduced as soon as it is
        complete. A weight gradient that waits comes behind its slot's others."""
        kinds = [op.kind for op in slot]
        if kinds != ["D", "W"]:
            return set()
        return finished - self.executor.several_gradients

    def bring_back_offloaded(self, slot: Slot) -> None:
        """Begin the copies from the host for the backwards of a slot, as far as their forwards have run."""
        for op in slot:
            key = pass_key(op)
            passage = self.passages.get(key)
            if op.kind == "D" and passage is not None:
                bring_back_ahead(passage.out)

    def announce_passes(self, slots: Sequence[Slot]) -> None:
        """Tell windows of weights which passes come behind the slot that begins."""
        has_gradients = self.finish is None
        coming: list[ComingPass] = []
        for op in chain.from_iterable(slots):
            if op.kind == "F" or op.kind == "D":
                coming.append(((op.stage, has_gradients), op.kind))
        for observer in self.executor.around:
            if isinstance(observer, UnitWindow):
                observer.announce(coming)

    def run_slot(self, slot: Slot) -> None:
        if is_paired(slot):
            self.run_paired_slot(slot)
            return
        for op in slot:
            self.run_unpaired_op(op, slot)

    def run_unpaired_op(self, op: PipelineOp, slot: Slot) -> None:
        spans = self.executor.spans
        with spans.span(str(op), "compute"):
            if op.kind == "F":
                self.run_forward(op)
            elif op.kind == "D":
                self.run_backward(op, slot)
            else:
                self.run_deferred_work(op)

    def run_forward(self, op: PipelineOp) -> None:
        carry = self.begin_carry(op)
        if self.finish is None:
            forward = self.forward_work(op, carry)
            self.run_strands([forward], fillers=[])
            carry = forward.passage.out
        else:
            carry = self.run_without_gradients(op, carry)
        self.send_activation(op, carry)

    def run_backward(self, op: PipelineOp, slot: Slot) -> None:
        queue = None
        if not has_weight_op(slot, op):
            queue = self.queue_until_weight_op(op, [])
        backward = self.backward_work(op, queue)
        self.run_strands([backward], fillers=[])
        self.send_gradient(op, backward.passage)

    def queue_until_weight_op(self, op: PipelineOp, waiting: DeferredQueue) -> DeferredQueue:
        """`waiting`: of the slot. Whichever W comes first computes all of it."""
        key = pass_key(op)
        self.deferred_work[key] = waiting
        return waiting

    def run_deferred_work(self, op: PipelineOp) -> None:
        key = pass_key(op)
        queue = self.deferred_work.pop(key, None)
        if queue is None:
            return
        while queue:
            work = queue.pop(0)
            work()
        self.executor.gradients.end_deferred_gradients(op.stage)

    def run_without_gradients(self, op: PipelineOp, carry: Carry) -> Carry:
        executor = self.executor
        steps = executor.steps_to_streams(op.stage)
        observers = executor.around
        if observers:
            key = pass_key(op)
            observed = ObservedSteps(steps, observers, key)
            return observed.forward(carry)
        return run_step_sequence(steps, carry)

    # ---- one stage's forward and backward, from cargo to cargo ----

    def stage_of(self, op: PipelineOp) -> Stage:
        return self.executor.stages[op.stage]

    def is_paired(self, op: PipelineOp) -> bool:
        return pass_key(op) in self.program.paired_passes

    def cut_stage_of(self, op: PipelineOp) -> CutStage:
        paired = self.is_paired(op)
        return self.executor.cut_stage(op.stage, paired)

    def forward_work(self, op: PipelineOp, carry: Carry) -> ForwardWork:
        key = pass_key(op)
        stage = self.cut_stage_of(op)
        has_cuts = len(stage.segments) > 1
        is_cut = has_cuts or self.is_paired(op)
        observers = self.executor.observers_of_pass(is_cut)
        passage = Passage(stage.segments, observers, key)
        passage.begin(carry)
        self.passages[key] = passage
        return ForwardWork(passage, stage.forward)

    def backward_work(self, op: PipelineOp, queue: DeferredQueue | None) -> BackwardWork:
        stage = self.cut_stage_of(op)
        passage = self.passage_with_gradients(op)
        strand = stage.backward if queue is None else stage.deferring
        return BackwardWork(passage, strand, queue)

    def run_strands(self, strands: Sequence[StrandWork], fillers: DeferredQueue) -> None:
        lanes = self.executor.lanes
        spans = self.executor.spans
        runner = StrandRunner(lanes, spans, fillers)
        runner.run(strands)

    def begin_carry(self, op: PipelineOp) -> Carry:
        """The carry at the beginning of a stage."""
        part = self.parts[op.microbatch]
        model = self.executor.model
        texts = (part.tokens_BS, part.labels_BS)
        documents = (part.begins_BS, part.imposed, part.filled_B)
        carry = model.begin(*texts, part.first, *documents, part.past, part.cp_size, part.numbers_BS)
        if part.reference_C is not None:
            carry["reference_C"] = part.reference_C
        if op.stage > 0:
            stream, *aside = self.received_streams(op)
            carry["stream"] = ResidualStream(stream)
            carry["streams"] = aside
        return carry

    def received_streams(self, op: PipelineOp) -> Streams:
        cargo_NTD = self.take_cargo(op)
        trains = self.finish is None
        streams: Streams = []
        for x_TD in cargo_NTD:
            x_TD = x_TD.detach()
            x_TD.requires_grad_(trains)
            streams.append(x_TD)
        key = pass_key(op)
        self.input_streams[key] = streams
        return streams

    def send_activation(self, op: PipelineOp, carry: Carry) -> None:
        """Send a stage's output to the next stage, or add its losses."""
        if not self.stage_of(op).predicts:
            streams = output_streams(carry)
            detached = [x_TD.detach() for x_TD in streams]
            following = op.stage + 1
            self.send_cargo(detached, op, following)
        elif self.finish is not None:
            self.finish(carry)
        else:
            losses_1M = carry["losses_1M"]
            self.losses_1M += losses_1M.detach()

    def passage_with_gradients(self, op: PipelineOp) -> Passage:
        """A microbatch's pass with the gradients of its outputs: of the losses, or as the next stage sent them."""
        key = pass_key(op)
        passage = self.passages.pop(key)
        out = passage.out
        aux = out["aux"]
        weights = self.weights
        assert weights is not None
        balance_weight = weights.balance.to(aux.dtype)
        if self.stage_of(op).predicts:
            losses_1M = out["losses_1M"]
            weights_1M = weights.losses_1M.to(losses_1M.dtype)
            weighted_1M = losses_1M * weights_1M
            loss = weighted_1M.sum() + aux * balance_weight
            one = torch.ones_like(loss)
            passage.set_output_gradients([loss], [one])
        else:
            # The balance losses of this stage are roots of backward too: their gradient is their weight.
            outputs = [*output_streams(out), aux]
            gradients = [*self.take_cargo(op), balance_weight]
            passage.set_output_gradients(outputs, gradients)
        return passage

    def send_gradient(self, op: PipelineOp, passage: Passage) -> None:
        """Send the gradient of a stage's input to the stage before."""
        key = pass_key(op)
        streams = self.input_streams.pop(key, None)
        if streams is None:
            return
        gradients = list(map(passage.gradient_of_input, streams))
        before = op.stage - 1
        self.send_cargo(gradients, op, before)

    def send_cargo(self, streams: Streams, op: PipelineOp, stage: int) -> None:
        """Send an op's result to the op of the same kind and microbatch in a neighbouring stage."""
        cargo_NTD = torch.stack(streams)
        executor = self.executor
        home = executor.homes[stage]
        if home == executor.rank:
            receiver = op._replace(stage=stage)
            self.local_cargo[receiver] = cargo_NTD
        else:
            executor.pipe.send(cargo_NTD, home)

    def take_cargo(self, op: PipelineOp) -> Tensor:
        """The cargo that an op reads, from a stage of this rank or of another."""
        if op in self.local_cargo:
            return self.local_cargo.pop(op)
        return self.inbox.take(op)

    def empty_cargo(self, op: PipelineOp) -> Tensor:
        """Memory for an op's cargo, or its gradient: shapes follow from the microbatch, which every rank has."""
        model = self.executor.model
        world = self.executor.world
        # streams: the residual stream, and in training those set aside
        later = op.stage
        if op.kind != "F":
            later += 1
        streams = 1
        if model.training:
            streams += self.executor.stages[later].aside
        # tokens of this rank
        part = self.parts[op.microbatch]
        sharing = world.context(part.cp_size).cp_tp
        tokens = part.tokens_BS.numel() // sharing.size
        like = next(model.parameters())
        shape = streams, tokens, model.model.hidden
        return like.new_empty(shape)

    # ---- paired slots: passes of two microbatches, interleaved ----

    def run_paired_slot(self, slot: Slot) -> None:
        """Forwards and backwards of different microbatches. Weight gradients of the slot fill gaps of the compute
        lane."""
        forwards: dict[PipelineOp, ForwardWork] = {}
        backwards: dict[PipelineOp, BackwardWork] = {}
        # Weight gradients that the slot itself asks for fill gaps of the compute lane, if the run wants that; others
        # wait. Both backwards of a slot have one queue: what is opened on one lane is open on the other too.
        fillers: DeferredQueue = []
        waiting: DeferredQueue = []
        for op in slot:
            if op.kind == "F":
                carry = self.begin_carry(op)
                forwards[op] = self.forward_work(op, carry)
            elif op.kind == "D":
                queue = self.weight_grad_queue(slot, op, fillers, waiting)
                backwards[op] = self.backward_work(op, queue)
        self.run_strands([*forwards.values(), *backwards.values()], fillers)
        self.end_filled_gradients(backwards, fillers)
        for op, forward in forwards.items():
            self.send_activation(op, forward.passage.out)
        for op, backward in backwards.items():
            self.send_gradient(op, backward.passage)

    def end_filled_gradients(self, backwards: Mapping[PipelineOp, BackwardWork], fillers: DeferredQueue) -> None:
        """Tell the gradients which stages have all weight gradients of a slot that filled its gaps."""
        stages = {op.stage for op, work in backwards.items() if work.queue is fillers}
        for stage in sorted(stages):
            self.executor.gradients.end_deferred_gradients(stage)

    def weight_grad_queue(
        self, slot: Slot, op: PipelineOp, fillers: DeferredQueue, waiting: DeferredQueue
    ) -> DeferredQueue | None:
        """Where the weight gradients of a paired backward go: to a later W, to the slot's fillers, or nowhere (None:
        they are computed at once)."""
        if not has_weight_op(slot, op):
            return self.queue_until_weight_op(op, waiting)
        fills_gaps = self.executor.config.pipeline.fill
        return fillers if fills_gaps else None


def pass_key(op: PipelineOp) -> PassKey:
    return op.stage, op.microbatch


def has_weight_op(slot: Slot, op: PipelineOp) -> bool:
    """Whether the weight gradients that belong to a data gradient are in the same slot."""
    weight_op = op._replace(kind="W")
    return weight_op in slot


def output_streams(carry: Carry) -> Streams:
    """The residual stream, and those that layers of multi-token prediction set aside."""
    stream = carry["stream"]
    return [stream.x_TD, *carry["streams"]]
