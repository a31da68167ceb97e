"""Memory policies: what becomes of the tensors that a region saves between forward and backward.

A policy is called around a region's function. `Keep` leaves autograd's choice; others may rebuild, offload or compress.
Policies are attached by region name at assembly. A region inside a step calls its policy itself; for a region that
spans steps, the run of steps becomes one step that calls the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moefold.anatomy.regions import REGIONS, RegionSpec, absent_regions, fused_experts_reason, merged_step_spec
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.model.moe.experts import Experts
from moefold.model.step_borders import is_differentiable
from moefold.model.steps import Carry, Region, Step, run_step_sequence
from moefold.model.transformer import Transformer

Function = Callable[..., Any]
Steps = Sequence[Step]
Tensors = Sequence[Tensor]


class Policy(Protocol):
    def around(self, fn: Function, *inputs: Any) -> Any:
        """Return `fn(*inputs)` with the same gradients. Gradients flow through inputs and outputs that are tensors and
        through parameters that `fn` uses. A second call of `fn` gives the same values; make it inside backward, or
        under `rerunning(key)`, so that nothing is counted twice."""
        ...


class Keep:
    """Everything that autograd saves stays on the device."""

    def around(self, fn: Function, *inputs: Any) -> Any:
        return fn(*inputs)


Policies = Mapping[str, Policy]  # by name of the region


def attach_policies(model: Transformer, wanted: Policies) -> None:
    """Attach a policy to each named region of the model, in place of those attached before. A name that is unknown,
    absent from this model, or inside another named region is refused."""
    check_wanted_regions(model, list(wanted))
    # Regions inside steps call their policy; regions over steps become steps when a step list is made.
    default = Keep()
    for module in model.modules():
        if isinstance(module, Region):
            policy = wanted.get(module.name, default)
            module.around = policy.around
    spanning: dict[str, Policy] = {}
    for name, policy in wanted.items():
        if REGIONS[name].spans:
            spanning[name] = policy
    model.rewrite_steps = partial(over_steps, wanted=spanning)


def check_wanted_regions(model: Transformer, names: Sequence[str]) -> None:
    fused = regions_fused_away(model)
    absent = absent_regions(model.model, {}) | fused
    problems: list[str] = []
    for name in names:
        if name not in REGIONS:
            present = [region for region in REGIONS if region not in absent]
            near = did_you_mean(name, present)
            problems.append(f'no region "{printable_text(name)}"; this model has {", ".join(present)}{near}')
        elif name in absent:
            problems.append(f'no region "{name}" in this model: {absent[name]}')
    known = [name for name in names if name in REGIONS]
    problems += overlapping_spans(known)
    if problems:
        raise UserError(*problems)


def regions_fused_away(model: Transformer) -> dict[str, str]:
    """Regions whose step this part of the model runs, but as a kernel that leaves no place for them."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    if any(module.fused for module in experts):
        return {"activation": fused_experts_reason()}
    return {}


def overlapping_spans(names: Sequence[str]) -> list[str]:
    """One problem for each region that spans steps of another that does."""
    spanning = [name for name in names if REGIONS[name].spans]
    problems: list[str] = []
    for inner, outer in permutations(spanning, 2):
        inner_steps = set(REGIONS[inner].spans)
        outer_steps = set(REGIONS[outer].spans)
        if inner_steps < outer_steps:
            problems.append(f'region "{inner}" lies inside "{outer}", whose policy covers it: name one of the two')
    return problems


def over_steps(steps: Steps, wanted: Policies) -> list[Step]:
    """The step list in which each run of steps that a wanted region spans is one step under its policy."""
    wanted_by_first_step = {REGIONS[name].spans[0]: name for name in wanted}
    rewritten: list[Step] = []
    remaining = list(steps)
    while remaining:
        first = remaining[0]
        count = 1
        name = wanted_by_first_step.get(first.spec.name)
        if name is None:
            rewritten.append(first)
        else:
            count = spanned_steps(remaining, REGIONS[name])
            merged = step_under_policy(name, remaining[:count], wanted[name])
            rewritten.append(merged)
        del remaining[:count]
    return rewritten


def spanned_steps(steps: Steps, region: RegionSpec) -> int:
    """How many steps from the first on the region spans: they follow the order of its names, and a layer ends before
    the next one begins."""
    remaining = list(region.spans)
    for count, step in enumerate(steps):
        name = step.spec.name
        if name not in remaining:
            return count
        position = remaining.index(name)
        del remaining[: position + 1]
    return len(steps)


def step_under_policy(name: str, steps: Steps, policy: Policy) -> Step:
    """One step that runs these steps under a policy."""

    def run_under_policy(carry: Carry) -> Carry:
        function = CarryFunction(steps, carry)
        outputs = policy.around(function, *function.inputs)
        return function.resulting_carry(outputs)

    if len(steps) == 1:
        return replace(steps[0], run=run_under_policy)
    specs = [step.spec for step in steps]
    return Step(merged_step_spec(name, specs), run_under_policy)


class CarryFunction:
    """A run of steps as a function from the carry's differentiable tensors to the floating-point tensors that it makes.

    All else in the resulting carry is taken from the first call. It is handed over once and not held here, so that a
    policy that keeps this function for backward keeps the inputs alone.
    """

    def __init__(self, steps: Steps, carry: Carry):
        self.steps = steps
        self.leaves, self.structure = tree_flatten(carry)
        self.inputs: list[Tensor] = []
        numbers: dict[int, int] = {}
        for leaf in self.leaves:
            if is_differentiable(leaf) and id(leaf) not in numbers:
                numbers[id(leaf)] = len(self.inputs)
                self.inputs.append(leaf)
        self.input_numbers = [numbers.get(id(leaf)) for leaf in self.leaves]
        self.called = False
        self.result: CarryTemplate | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        for place, number in enumerate(self.input_numbers):
            if number is not None:
                leaves[place] = inputs[number]
        given = tree_unflatten(leaves, self.structure)
        carry = run_step_sequence(self.steps, given)
        template = CarryTemplate(carry, inputs, leaves)
        outputs = tuple(template.outputs)
        template.outputs = []
        # Only the first call makes the resulting carry; a rerun in backward makes the tensors alone.
        if not self.called:
            self.called = True
            self.result = template
        return outputs

    def resulting_carry(self, outputs: Tensors) -> Carry:
        template = self.result
        self.result = None
        assert template is not None, "the policy did not call the function"
        return template.fill(outputs, self.inputs)


class CarryTemplate:
    """A carry with the places of a function's inputs and outputs left open."""

    def __init__(self, carry: Carry, inputs: Tensors, old_leaves: Sequence[Any]):
        self.leaves, self.structure = tree_flatten(carry)
        self.outputs: list[Tensor] = []
        self.input_places: dict[int, int] = {}  # place in the flattened carry -> number of the input
        self.output_places: dict[int, int] = {}
        input_numbers = {id(x): number for number, x in enumerate(inputs)}
        output_numbers: dict[int, int] = {}
        untouched = set(map(id, old_leaves))
        # Integers, text and untouched tensors stay in the template; all else comes from inputs and outputs.
        for place, leaf in enumerate(self.leaves):
            address = id(leaf)
            if address in input_numbers:
                self.input_places[place] = input_numbers[address]
            elif is_floating_tensor(leaf) and address not in untouched:
                if address not in output_numbers:
                    output_numbers[address] = len(self.outputs)
                    self.outputs.append(leaf)
                self.output_places[place] = output_numbers[address]
        for place in (*self.input_places, *self.output_places):
            self.leaves[place] = None  # the template keeps no tensor that passes through the function

    def fill(self, outputs: Tensors, inputs: Tensors) -> Carry:
        for place, number in self.input_places.items():
            self.leaves[place] = inputs[number]
        for place, number in self.output_places.items():
            self.leaves[place] = outputs[number]
        return tree_unflatten(self.leaves, self.structure)


def is_floating_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
