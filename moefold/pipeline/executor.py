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

from moefold.anatomy.stages import Stage, program_for, rank_of_stage, stages_of
from moefold.comm.lanes import Lanes
from moefold.comm.transfers import Pipe
from moefold.config.run import Config
from moefold.data.loader import Batch
from moefold.layout.axes import World
from moefold.model.steps import Carry, Step, run_steps
from moefold.model.transformer import Transformer
from moefold.observe.trace import Spans
from moefold.pipeline.inbox import Inbox
from moefold.pipeline.passage import Passage
from moefold.pipeline.uses import last_uses, users_of
from moefold.pipeline.weave import Piece, weave
from moefold.pipeline.weaving import Weaving
from moefold.precision.later import Work, held
from moefold.schedule.program import Op, Program, Slot, is_paired
from moefold.shard.gradients import Gradients

Key = tuple[int, int]  # stage, microbatch


class Executor:
    def __init__(self, config: Config, model: Transformer, gradients: Gradients, world: World, spans: Spans):
        self.config, self.model, self.gradients, self.world, self.spans = config, model, gradients, world, spans
        self.stages, self.homes = stages_of(config), rank_of_stage(config)
        self.me, self.pipe = world.axis("pipe").index, Pipe(world.axis("pipe"))
        self.lanes = Lanes(world.device)
        self.users = users_of(model)

    def watch(self, steps: list[Step]) -> list[Step]:
        """The steps of a passage, as they are; whoever wants to watch them takes this method's place."""
        return steps

    def train(self, parts: Sequence[Batch], weight_1M: torch.Tensor) -> torch.Tensor:
        """Forward and backward of all microbatches; gradients end in their buckets. Returns the sums of the losses of
        those that ended here: zeros on ranks without the last stage."""
        program = program_for(self.config, len(parts))
        return Trip(self, program, parts, weight_1M).run()

    @torch.no_grad()
    def look(self, parts: Sequence[Batch], finish: Callable[[Carry], None]) -> None:
        """Forward alone; `finish` gets what came out of the last stage, microbatch by microbatch, where that is."""
        stages = [[number for number, home in enumerate(self.homes) if home == rank] for rank in set(self.homes)]
        program: Program = [[(Op("F", s, m),) for s in mine for m in range(len(parts))] for mine in stages]
        trip = Trip(self, program, parts, finish=finish)
        trip.run()


class Trip:
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
        self.handed: dict[Op, torch.Tensor] = {}  # between stages of this rank
        self.passages: dict[Key, Passage] = {}
        self.cargo: dict[Key, list[torch.Tensor]] = {}
        self.waiting: dict[Key, list[Work]] = {}
        paired = [op for slot in self.slots if is_paired(slot) for op in slot]
        self.cut = {(op.stage, op.microbatch) for op in paired}
        self.final = last_uses(self.slots, executor.users)
        self.losses_1M = torch.zeros(1 + executor.model.model.mtp, dtype=torch.float64, device=executor.world.device)

    def run(self) -> torch.Tensor:
        for number, slot in enumerate(self.slots):
            self.inbox.expect([op for near in self.slots[number : number + 2] for op in near])
            names, leave_early = self.final.get(number, set()), self.one_backward(slot)
            if leave_early:
                self.at.gradients.expect_last(names)
            if is_paired(slot):
                self.run_paired(slot)
            else:
                for op in slot:
                    self.run_op(op, slot)
            if names and not leave_early:
                self.at.gradients.complete(names)
        self.at.pipe.flush()
        return self.losses_1M

    def one_backward(self, slot: Slot) -> bool:
        """Whether all gradients of a slot come of one call of backward: its parameters leave as it finishes them."""
        kinds = [op.kind for op in slot]
        return kinds == ["D", "W"] and (slot[0].stage, slot[0].microbatch) not in self.cut

    def run_op(self, op: Op, slot: Slot) -> None:
        key = (op.stage, op.microbatch)
        with self.at.spans.span(str(op), "compute"):
            if op.kind == "F":
                self.leave(op, self.pass_through(self.enter(op), self.begin_passage(op)))
            elif op.kind == "D":
                passage = self.hand_back(op)
                queue = self.waiting.setdefault(key, []) if Op("W", *key) not in slot else None
                while passage.cuts:
                    backward(passage, queue)
                self.return_(op, passage)
            else:
                for work in self.waiting.pop(key, []):
                    work()

    def pass_through(self, carry: Carry, passage: Passage | None) -> Carry:
        if passage is None:
            return carry
        for _ in passage.segments:
            carry = passage.forward(carry)
        return carry

    # ---- one stage's forward and backward, from cargo to cargo ----

    def stage(self, op: Op) -> Stage:
        return self.at.stages[op.stage]

    def begin_passage(self, op: Op) -> Passage | None:
        if self.finish is not None:
            return None
        key = (op.stage, op.microbatch)
        steps = self.at.watch(self.at.model.steps(self.stage(op)))
        passage = self.passages[key] = Passage(steps, key in self.cut)
        return passage

    def enter(self, op: Op) -> Carry:
        """The carry at the beginning of a stage; without gradients, the one at its end."""
        model, part = self.at.model, self.parts[op.microbatch]
        carry = model.begin(part.tokens_BS, part.labels_BS, part.first, part.begins_BS)
        if op.stage > 0:
            cargo_NTD = self.handed.pop(op) if op in self.handed else self.inbox.take(op)
            streams = [x_TD.detach().requires_grad_(self.finish is None) for x_TD in cargo_NTD]
            self.cargo[op.stage, op.microbatch] = streams
            carry |= {"x_TD": streams[0], "streams": streams[1:]}
        return carry if self.finish is None else run_steps(model.body(self.stage(op)), carry)

    def leave(self, op: Op, carry: Carry) -> None:
        """Send a stage's result on, or keep the losses."""
        if not self.stage(op).predicts:
            self.hand_on(torch.stack([carry["x_TD"].detach(), *(x.detach() for x in carry["streams"])]), op, +1)
        elif self.finish is not None:
            self.finish(carry)
        else:
            self.losses_1M += carry["losses_1M"].detach()

    def hand_back(self, op: Op) -> Passage:
        """A microbatch's passage with the gradients of what came out of it."""
        passage = self.passages.pop((op.stage, op.microbatch))
        out = passage.out
        if self.stage(op).predicts:
            assert self.weight_1M is not None
            loss = (out["losses_1M"] * self.weight_1M.to(out["losses_1M"].dtype)).sum() + out["aux"]
            passage.hand([loss], [torch.ones_like(loss)])
        else:
            cargo_NTD = self.handed.pop(op) if op in self.handed else self.inbox.take(op)
            outputs = [out["x_TD"], *out["streams"], out["aux"]]
            passage.hand(outputs, [*cargo_NTD, torch.ones_like(out["aux"])])
        return passage

    def return_(self, op: Op, passage: Passage) -> None:
        """Send the gradient of a stage's cargo to where it came from."""
        streams = self.cargo.pop((op.stage, op.microbatch), None)
        if streams is not None:
            self.hand_on(torch.stack([passage.gradient_of(x_TD) for x_TD in streams]), op, -1)

    def hand_on(self, cargo_NTD: torch.Tensor, op: Op, by: int) -> None:
        to = Op(op.kind, op.stage + by, op.microbatch)
        home = self.at.homes[to.stage]
        if home == self.at.me:
            self.handed[to] = cargo_NTD
        else:
            self.at.pipe.send(cargo_NTD, home)

    def empty(self, op: Op) -> torch.Tensor:
        """Where an op's cargo, or its gradient, will be: shapes follow from the microbatch, which every rank has."""
        border = self.at.stages[op.stage if op.kind == "F" else op.stage + 1]
        axes = self.at.world
        tokens = self.parts[op.microbatch].tokens_BS.numel() // (axes.axis("cp").size * axes.axis("tp").size)
        like = next(self.at.model.parameters())
        streams = 1 + (border.aside if self.at.model.training else 0)
        return torch.empty(streams, tokens, self.at.model.model.hidden, dtype=like.dtype, device=like.device)

    # ---- a forward and a backward, woven ----

    def run_paired(self, slot: Slot) -> None:
        """One forward and one backward of other microbatches; weight gradients that are here too fill gaps."""
        ahead, behind = (next(op for op in slot if op.kind == kind) for kind in "FD")
        carry, forward = self.enter(ahead), self.begin_passage(ahead)
        passage = self.hand_back(behind)
        assert forward is not None
        out = [segment[0].spec for segment in forward.segments]
        back = [segment[0].spec for segment in reversed(passage.segments)]
        key, fillers = (behind.stage, behind.microbatch), list[Work]()
        if Op("W", *key) not in slot:
            queue = self.waiting.setdefault(key, [])
        else:
            queue = fillers if self.at.config.pipeline.fill else None

        def step_forward() -> Carry:
            nonlocal carry
            carry = forward.forward(carry)
            return carry

        weaving = Weaving(self.at.lanes, self.at.spans, fillers)
        for strand, index in weave([[Piece(spec.lane) for spec in specs] for specs in (out, back)]):
            op, spec, work, inputs = (
                (ahead, out[index], step_forward, carry)
                if strand == 0
                else (behind, back[index], partial(backward, passage, queue), passage.handed)
            )
            weaving.begin(strand, spec.lane, f"{spec.name} {op}", work, inputs)
        weaving.end()
        self.leave(ahead, carry)
        self.return_(behind, passage)


def backward(passage: Passage, queue: list[Work] | None) -> object:
    """The next segment backward; its weight gradients into the queue, if there is one. Returns what it hands over."""
    with held(queue) if queue is not None else nullcontext():
        passage.backward()
    return passage.handed
