"""Runs this rank's part of a program: forwards, data gradients, weight gradients, slot by slot.

What is sent and received follows from the program alone. A stage's input is one tensor, its cargo: the residual stream
and, behind layers that look ahead, the streams set aside. Within a paired slot a forward and a backward are woven, step
by step, so that one's travel to experts runs beside the other's work.

N streams of T tokens of width D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from moefold.anatomy.stage_contents import Stage, pipeline_program, pipeline_stages, rank_of_each_stage
from moefold.comm.lanes import Lanes
from moefold.comm.p2p import PipelineChannel
from moefold.config.run import Config
from moefold.data.loader import Batch
from moefold.layout.axes import World
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.model.steps import Carry, Step, run_step_sequence
from moefold.model.transformer import Transformer
from moefold.observe.trace import SpanRecorder
from moefold.pipeline.inbox import Inbox
from moefold.pipeline.last_gradients import last_gradient_slots, stages_using_parameters
from moefold.pipeline.pair_order import StrandPiece, interleave_strands
from moefold.pipeline.pair_runner import PairRunner
from moefold.pipeline.passage import Passage
from moefold.schedule.program import PipelineOp, Program, Slot, is_paired
from moefold.shard.gradients import Gradients

StageMicrobatch = tuple[int, int]  # stage, microbatch


class Executor:
    def __init__(self, config: Config, model: Transformer, gradients: Gradients, world: World, spans: SpanRecorder):
        self.config, self.model, self.gradients, self.world, self.spans = config, model, gradients, world, spans
        self.stages, self.homes = pipeline_stages(config), rank_of_each_stage(config)
        self.me, self.pipe = world.axis("pipe").index, PipelineChannel(world.axis("pipe"))
        self.lanes = Lanes(world.device)
        self.users = stages_using_parameters(model)

    def watch(self, steps: list[Step]) -> list[Step]:
        """The steps of a passage, as they are; whoever wants to watch them takes this method's place."""
        return steps

    def train(self, parts: Sequence[Batch], weight_1M: torch.Tensor) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients end in their buckets. Returns the sums of the losses of
        those that ended here: zeros on ranks without the last stage."""
        program = pipeline_program(self.config, len(parts))
        return StepRun(self, program, parts, weight_1M).run()

    @torch.no_grad()
    def forward_only(self, parts: Sequence[Batch], finish: Callable[[Carry], None]) -> None:
        """Forward alone; `finish` gets what came out of the last stage, microbatch by microbatch, where that is."""
        stages = [[number for number, home in enumerate(self.homes) if home == rank] for rank in set(self.homes)]
        program: Program = [[(PipelineOp("F", s, m),) for s in mine for m in range(len(parts))] for mine in stages]
        trip = StepRun(self, program, parts, finish=finish)
        trip.run()


class StepRun:
    """One run of a program over one batch."""

    def __init__(
        self,
        executor: Executor,
        program: Program,
        parts: Sequence[Batch],
        weight_1M: torch.Tensor | None = None,
        finish: Callable[[Carry], None] | None = None,
    ):
        self.at, self.program, self.parts, self.weight_1M, self.finish = executor, program, parts, weight_1M, finish
        self.slots = program[executor.me]
        self.inbox = Inbox(program, executor.homes, executor.pipe, self.empty)
        self.handed: dict[PipelineOp, torch.Tensor] = {}  # between stages of this rank
        self.passages: dict[StageMicrobatch, Passage] = {}
        self.cargo: dict[StageMicrobatch, list[torch.Tensor]] = {}
        self.waiting: dict[StageMicrobatch, list[DeferredWork]] = {}
        paired = [op for slot in self.slots if is_paired(slot) for op in slot]
        self.cut = {(op.stage, op.microbatch) for op in paired}
        self.last_gradient_slots = last_gradient_slots(self.slots, executor.users)
        self.losses_1M = torch.zeros(1 + executor.model.model.mtp, dtype=torch.float64, device=executor.world.device)

    def run(self) -> torch.Tensor:
        for number, slot in enumerate(self.slots):
            self.inbox.expect([op for near in self.slots[number : number + 2] for op in near])
            names, leave_early = self.last_gradient_slots.get(number, set()), self.is_one_backward(slot)
            if leave_early:
                self.at.gradients.expect_last_gradients(names)
            if is_paired(slot):
                self.run_paired_slot(slot)
            else:
                for op in slot:
                    self.run_unpaired_op(op, slot)
            if names and not leave_early:
                self.at.gradients.mark_complete(names)
        self.at.pipe.flush()
        return self.losses_1M

    def is_one_backward(self, slot: Slot) -> bool:
        """Whether all gradients of a slot come of one call of backward: its parameters leave as it finishes them."""
        kinds = [op.kind for op in slot]
        return kinds == ["D", "W"] and (slot[0].stage, slot[0].microbatch) not in self.cut

    def run_unpaired_op(self, op: PipelineOp, slot: Slot) -> None:
        key = (op.stage, op.microbatch)
        with self.at.spans.span(str(op), "compute"):
            if op.kind == "F":
                self.finish_stage(op, self.run_all_segments(self.begin_stage(op), self.begin_passage(op)))
            elif op.kind == "D":
                passage = self.passage_with_gradients(op)
                queue = self.waiting.setdefault(key, []) if PipelineOp("W", *key) not in slot else None
                while passage.cuts:
                    backward_next_segment(passage, queue)
                self.send_input_gradient(op, passage)
            else:
                for work in self.waiting.pop(key, []):
                    work()

    def run_all_segments(self, carry: Carry, passage: Passage | None) -> Carry:
        if passage is None:
            return carry
        for _ in passage.segments:
            carry = passage.forward(carry)
        return carry

    # ---- one stage's forward and backward, from cargo to cargo ----

    def stage(self, op: PipelineOp) -> Stage:
        return self.at.stages[op.stage]

    def begin_passage(self, op: PipelineOp) -> Passage | None:
        if self.finish is not None:
            return None
        key = (op.stage, op.microbatch)
        steps = self.at.watch(self.at.model.steps(self.stage(op)))
        passage = self.passages[key] = Passage(steps, key in self.cut)
        return passage

    def begin_stage(self, op: PipelineOp) -> Carry:
        """The carry at the beginning of a stage; without gradients, the one at its end."""
        model, part = self.at.model, self.parts[op.microbatch]
        carry = model.begin(part.tokens_BS, part.labels_BS, part.first, part.begins_BS)
        if op.stage > 0:
            cargo_NTD = self.handed.pop(op) if op in self.handed else self.inbox.take(op)
            streams = [x_TD.detach().requires_grad_(self.finish is None) for x_TD in cargo_NTD]
            self.cargo[op.stage, op.microbatch] = streams
            carry |= {"x_TD": streams[0], "streams": streams[1:]}
        return carry if self.finish is None else run_step_sequence(model.body(self.stage(op)), carry)

    def finish_stage(self, op: PipelineOp, carry: Carry) -> None:
        """Send a stage's result on, or keep the losses."""
        if not self.stage(op).predicts:
            self.send_cargo(torch.stack([carry["x_TD"].detach(), *(x.detach() for x in carry["streams"])]), op, +1)
        elif self.finish is not None:
            self.finish(carry)
        else:
            self.losses_1M += carry["losses_1M"].detach()

    def passage_with_gradients(self, op: PipelineOp) -> Passage:
        """A microbatch's passage with the gradients of what came out of it."""
        passage = self.passages.pop((op.stage, op.microbatch))
        out = passage.out
        if self.stage(op).predicts:
            assert self.weight_1M is not None
            loss = (out["losses_1M"] * self.weight_1M.to(out["losses_1M"].dtype)).sum() + out["aux"]
            passage.set_output_gradients([loss], [torch.ones_like(loss)])
        else:
            cargo_NTD = self.handed.pop(op) if op in self.handed else self.inbox.take(op)
            outputs = [out["x_TD"], *out["streams"], out["aux"]]
            passage.set_output_gradients(outputs, [*cargo_NTD, torch.ones_like(out["aux"])])
        return passage

    def send_input_gradient(self, op: PipelineOp, passage: Passage) -> None:
        """Send the gradient of a stage's cargo to where it came from."""
        streams = self.cargo.pop((op.stage, op.microbatch), None)
        if streams is not None:
            self.send_cargo(torch.stack([passage.gradient_of_input(x_TD) for x_TD in streams]), op, -1)

    def send_cargo(self, cargo_NTD: torch.Tensor, op: PipelineOp, by: int) -> None:
        to = PipelineOp(op.kind, op.stage + by, op.microbatch)
        home = self.at.homes[to.stage]
        if home == self.at.me:
            self.handed[to] = cargo_NTD
        else:
            self.at.pipe.send(cargo_NTD, home)

    def empty(self, op: PipelineOp) -> torch.Tensor:
        """Where an op's cargo, or its gradient, will be: shapes follow from the microbatch, which every rank has."""
        border = self.at.stages[op.stage if op.kind == "F" else op.stage + 1]
        axes = self.at.world
        tokens = self.parts[op.microbatch].tokens_BS.numel() // (axes.axis("cp").size * axes.axis("tp").size)
        like = next(self.at.model.parameters())
        streams = 1 + (border.aside if self.at.model.training else 0)
        return torch.empty(streams, tokens, self.at.model.model.hidden, dtype=like.dtype, device=like.device)

    # ---- a forward and a backward, woven ----

    def run_paired_slot(self, slot: Slot) -> None:
        """One forward and one backward of other microbatches; weight gradients that are here too fill gaps."""
        ahead, behind = (next(op for op in slot if op.kind == kind) for kind in "FD")
        carry, forward = self.begin_stage(ahead), self.begin_passage(ahead)
        passage = self.passage_with_gradients(behind)
        assert forward is not None
        out = [segment[0].spec for segment in forward.segments]
        back = [segment[0].spec for segment in reversed(passage.segments)]
        key, fillers = (behind.stage, behind.microbatch), list[DeferredWork]()
        if PipelineOp("W", *key) not in slot:
            queue = self.waiting.setdefault(key, [])
        else:
            queue = fillers if self.at.config.pipeline.fill else None

        def step_forward() -> Carry:
            nonlocal carry
            carry = forward.forward(carry)
            return carry

        weaving = PairRunner(self.at.lanes, self.at.spans, fillers)
        for strand, index in interleave_strands([[StrandPiece(spec.lane) for spec in specs] for specs in (out, back)]):
            op, spec, work, inputs = (
                (ahead, out[index], step_forward, carry)
                if strand == 0
                else (behind, back[index], partial(backward_next_segment, passage, queue), passage.handed)
            )
            weaving.begin(strand, spec.lane, f"{spec.name} {op}", work, inputs)
        weaving.end()
        self.finish_stage(ahead, carry)
        self.send_input_gradient(behind, passage)


def backward_next_segment(passage: Passage, queue: list[DeferredWork] | None) -> object:
    """The next segment backward; its weight gradients into the queue, if there is one. Returns what it hands over."""
    with deferring_weight_grads(queue) if queue is not None else nullcontext():
        passage.backward()
    return passage.handed
