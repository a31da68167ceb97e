"""Steps, regions and observers: the ideas the model is written in.

A step takes the carry (everything that a microbatch has at that point) and returns the next. Running the steps in
order is the plain forward; a pipeline may interleave two step lists, a graph may capture the static steps. A region is
a named part of a step whose saved tensors a memory policy may rebuild or offload: it calls its function as it is until
a policy is attached (memory/policy.py). An observer is called before and after each step, forward and backward
(model/step_borders.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn

from moefold.anatomy.step_specs import StepSpec
from moefold.config.memory_regions import REGIONS
from moefold.layout.rerun import RERUN, rerunning
from moefold.layout.token_numbers import computing_tokens

Carry = dict[str, Any]
StepRun = Callable[[Carry], Carry]
StepMethods = dict[str, StepRun]
PassKind = Literal["F", "D"]  # forward; backward, which gives the data gradient
AnyFunction = Callable[..., Any]
PassKey = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Step:
    """A step of the anatomy with the code that runs it. `layer`: the number of its layer, if it belongs to one."""

    spec: StepSpec
    run: StepRun
    layer: int | None = None


Steps = list[Step]
StepRewrite = Callable[[Steps], Steps]


class Around(Protocol):
    """An observer of steps. `key` is (stage, microbatch); `kind` is F in forward and D in backward.

    `before` D comes when the gradients of the step's outputs are there, `after` D when those of its inputs are. A step
    without trainable tensors before it has no D. Calls come on the thread that runs the step: exchanges may have one of
    their own (comm/lanes.py), and on CUDA backward has autograd's.
    """

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None: ...

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None: ...


def bind_steps(specs: Sequence[StepSpec], methods: StepMethods, layer: int) -> Steps:
    """Each step of a layer's anatomy with the method of its name."""
    steps: Steps = []
    for spec in specs:
        run = methods[spec.name]
        step = Step(spec, run, layer)
        steps.append(step)
    return steps


def with_token_numbers(steps: Steps) -> Steps:
    """Steps whose products draw random numbers by token (precision/linear.py, `draws_by_token`)."""
    numbered: Steps = []
    for step in steps:
        run = partial(run_with_tokens, step.run)
        numbered_step = replace(step, run=run)
        numbered.append(numbered_step)
    return numbered


def run_with_tokens(run: StepRun, carry: Carry) -> Carry:
    """Run a step whose products may ask which tokens their rows are."""
    shard = carry["token_shard"]
    with computing_tokens(shard.numbers_of_rows):
        return run(carry)


def drop_from_carry(carry: Carry, *names: str) -> Carry:
    """The carry without entries that no later step reads, so that their memory can be freed."""
    kept = carry.copy()
    for name in names:
        kept.pop(name, None)
    return kept


def run_step_sequence(steps: Sequence[Step], carry: Carry) -> Carry:
    for step in steps:
        carry = step.run(carry)
    return carry


def steps_as_given(steps: Steps) -> Steps:
    """The rewrite of a step list that changes nothing."""
    return steps


def rerun_step(step: Step, carry: Carry, key: PassKey) -> Carry:
    """Run a step's forward again for its backward, with gradients, under the key of its first run. Nothing is counted
    or recorded a second time, and observers are not called: they had `before` D, which comes first."""
    with rerunning(key), torch.enable_grad():
        return step.run(carry)


def inside_recompute() -> bool:
    """Whether this forward repeats one that was counted and recorded: inside `rerunning`, or inside any backward."""
    if RERUN.key is not None:
        return True
    task: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]
    return task != -1


class Region(nn.Module):
    """A named place inside a step where a memory policy may act. Names are those of config/memory_regions.py."""

    def __init__(self, name: str):
        super().__init__()
        regions = REGIONS.values()
        inside = [region.name for region in regions if region.inside]
        if name not in inside:
            raise ValueError(f'no region "{name}" inside a step; config/memory_regions.py has: {", ".join(inside)}')
        self.name = name
        self.around: AnyFunction = call_directly  # a policy's method, once one is attached

    def forward(self, fn: AnyFunction, *inputs: Any) -> Any:
        return self.around(fn, *inputs)


@dataclass(frozen=True)
class FollowsFromFirst:
    """A region's function whose outputs all follow from the first, as `again(first)`. A policy that rebuilds them keeps
    that output, which others keep too, instead of the inputs."""

    run: AnyFunction
    again: Callable[[Any], Any]

    def __call__(self, *inputs: Any) -> Any:
        return self.run(*inputs)


def call_directly(fn: AnyFunction, *inputs: Any) -> Any:
    return fn(*inputs)
