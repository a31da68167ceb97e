"""Dispatch ahead of the experts' backward: where region `dispatch` is recomputed, tokens are sent again before the
backward of `combine` sends gradients.

    steps on two lanes, where shared experts or another microbatch run beside exchanges:

        compute   add.D | shared.D                            | experts.D
        comm            | dispatch again, combine.D           |            | dispatch.D

    otherwise one lane runs all steps, and tokens are sent again beside the backward of the next layer's attention:

        compute   attend.D of the next layer | add.D combine.D experts.D dispatch.D
        comm      dispatch again             |

Exchanges keep one order on all ranks. On two lanes that is the order of the program. On one lane, the next layer's
exchanges have been issued when the backward of its attention begins, and `combine` waits for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefold.comm.lanes import THIS_LANE, Lanes, Ticket
from moefold.memory.recompute import Promises, Rebuild, RegionCall
from moefold.model.step_borders import is_differentiable
from moefold.model.steps import Carry, Step, StepRun, drop_from_carry

SENT = "dispatch_call"  # the entry of the carry from `dispatch` to `combine`
LAST_SENT = "last_dispatch"  # that from `combine` to a step of the next layer
HIDING_STEPS = ("attend", "mlp", "predict")  # whose backward has no exchange between experts' ranks


class LastDispatch(NamedTuple):
    """The dispatch of a layer. Its tokens are the autograd graph's to keep, not the carry's."""

    layer: int | None
    call: ReferenceType[RegionCall]


@dataclass(frozen=True)
class DispatchAhead:
    """`policy`: that of region `dispatch`. `lanes`: on whose comm lane tokens are sent beside attention; None where
    norms exchange tokens too, whose order two lanes would not keep."""

    promises: Promises
    policy: Rebuild
    lanes: Lanes | None = None
    under_way: WeakKeyDictionary[RegionCall, Ticket] = field(default_factory=WeakKeyDictionary[RegionCall, Ticket])

    def around_step(self, step: Step) -> Step:
        step = self.promises.around_step(step)
        name = step.spec.name
        if name == "dispatch":
            return replace(step, run=partial(self.note_call, step.run))
        if name == "combine":
            return replace(step, run=partial(self.send_before_backward, step.layer, step.run))
        if name in HIDING_STEPS and self.lanes is not None:
            return replace(step, run=partial(self.hide_behind_backward, step.layer, step.run))
        return step

    def note_call(self, run: StepRun, carry: Carry) -> Carry:
        carry = run(carry)
        rows = carry["rows"]
        call = self.promises.call_of(rows.source_ND)
        if call is None or call.policy is not self.policy:
            return carry  # nothing was sent, or all of it is kept
        return carry | {SENT: call}

    def send_before_backward(self, layer: int | None, run: StepRun, carry: Carry) -> Carry:
        """Run `combine`, whose backward begins with the dispatch, unless that was sent before."""
        call = carry.get(SENT)
        given = drop_from_carry(carry, SENT, LAST_SENT)
        carry = run(given)
        if call is None:
            return carry
        before_backward(given, carry, partial(self.await_tokens, call))
        if THIS_LANE.is_comm:
            return carry
        return carry | {LAST_SENT: LastDispatch(layer, ref(call))}

    def hide_behind_backward(self, layer: int | None, run: StepRun, carry: Carry) -> Carry:
        """Run a step whose backward begins with sending the tokens of the layer before it once more."""
        last: LastDispatch | None = carry.get(LAST_SENT)
        if last is None or last.layer == layer:
            return run(carry)
        given = drop_from_carry(carry, LAST_SENT)
        carry = run(given)
        before_backward(given, carry, partial(self.begin_sending, last.call))
        return carry

    def begin_sending(self, sent: ReferenceType[RegionCall], _: Tensor) -> None:
        call = sent()
        if call is None or call in self.under_way or call.outputs is not None:
            return
        assert self.lanes is not None
        self.under_way[call] = self.lanes.send(partial(call.output, 0))

    def await_tokens(self, call: RegionCall, _: Tensor) -> None:
        """Wait for tokens that are under way, or send them now."""
        ticket = self.under_way.pop(call, None)
        if ticket is not None:
            ticket.result()
        call.output(0)


def before_backward(given: Carry, made: Carry, begin: Callable[[Tensor], None]) -> None:
    """Call `begin` when backward reaches the tensors that a step has made."""
    known = {id(leaf) for leaf in tree_leaves(given)}
    for leaf in tree_leaves(made):
        if is_differentiable(leaf) and id(leaf) not in known:
            leaf.register_hook(begin)
