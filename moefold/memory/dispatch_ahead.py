"""Dispatch ahead of the experts' backward: where region `dispatch` is recomputed, the backward of `combine` sends the
tokens again before it sends gradients.

    compute   add.D | shared.D                            | experts.D
    comm            | dispatch again, combine.D           |            | dispatch.D

Steps that exchange tokens run on the comm lane, in the order of the program. Tokens that are sent again there keep one
order on all ranks, and travel beside what the compute lane has to do: shared experts, or another microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefold.memory.recompute import Promises, Rebuild, RegionCall
from moefold.model.step_borders import is_differentiable
from moefold.model.steps import Carry, Step, StepRun, drop_from_carry

SENT = "dispatch_call"  # the entry of the carry from `dispatch` to `combine`


@dataclass(frozen=True)
class DispatchAhead:
    """`policy`: that of region `dispatch`."""

    promises: Promises
    policy: Rebuild

    def around_step(self, step: Step) -> Step:
        step = self.promises.around_step(step)
        name = step.spec.name
        if name == "dispatch":
            return replace(step, run=partial(self.note_call, step.run))
        if name == "combine":
            return replace(step, run=partial(send_before_backward, step.run))
        return step

    def note_call(self, run: StepRun, carry: Carry) -> Carry:
        carry = run(carry)
        rows = carry["rows"]
        call = self.promises.call_of(rows.source_ND)
        if call is None or call.policy is not self.policy:
            return carry  # nothing was sent, or all of it is kept
        return carry | {SENT: call}


def send_before_backward(run: StepRun, carry: Carry) -> Carry:
    """Run `combine`, whose backward begins with the dispatch."""
    call = carry.get(SENT)
    given = drop_from_carry(carry, SENT)
    known = {id(leaf) for leaf in tree_leaves(given)}
    carry = run(given)
    if call is None:
        return carry
    send_again = partial(rebuild_outputs, call)
    for leaf in tree_leaves(carry):
        if is_differentiable(leaf) and id(leaf) not in known:
            leaf.register_hook(send_again)
    return carry


def rebuild_outputs(call: RegionCall, _: Tensor) -> None:
    call.output(0)
