"""Memory policies: what becomes of the tensors that a region saves between forward and backward.

A policy is called around a region's function. `Keep` leaves autograd's choice; others may rebuild, offload or compress.
Policies are attached by region name at assembly. A region inside a step calls its policy itself; for a region that
spans steps, the run of steps becomes one step that calls the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from moefold.anatomy.regions import REGIONS, RegionSpec, absent_regions, fused_experts_reason, merged_step_spec
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.model.moe.experts import Experts
from moefold.model.step_borders import is_differentiable
from moefold.model.steps import Carry, Region, Step, run_step_sequence
from moefold.model.transformer import Transformer


class Policy(Protocol):
    def around(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Return `fn(*inputs)` with the same gradients. Gradients flow through inputs and outputs that are tensors and
        through parameters that `fn` uses. A second call of `fn` gives the same values; make it inside backward, or
        under `rerunning(key)`, so that nothing is counted twice."""
        ...


class Keep:
    """Everything that autograd saves stays on the device."""

    def around(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        return fn(*inputs)


def attach_policies(model: Transformer, wanted: Mapping[str, Policy]) -> None:
    """Attach a policy to each named region of the model, in place of those attached before. A name that is unknown,
    absent from this model, or inside another named region is refused."""
    modules = [module for module in model.modules() if isinstance(module, Region)]
    check_wanted_regions(model, list(wanted))
    default = Keep()
    for module in modules:
        module.around = wanted.get(module.name, default).around
    spanning = {name: policy for name, policy in wanted.items() if REGIONS[name].spans}
    model.rewrite_steps = partial(over_steps, wanted=spanning)


def check_wanted_regions(model: Transformer, names: Sequence[str]) -> None:
    absent = absent_regions(model.model, {}) | regions_fused_away(model)
    problems: list[str] = []
    for name in names:
        if name not in REGIONS:
            present = [region for region in REGIONS if region not in absent]
            near = did_you_mean(name, present)
            problems.append(f'no region "{printable_text(name)}"; this model has {", ".join(present)}{near}')
        elif name in absent:
            problems.append(f'no region "{name}" in this model: {absent[name]}')
    problems += overlapping_spans([name for name in names if name in REGIONS])
    if problems:
        raise UserError(*problems)


def regions_fused_away(model: Transformer) -> dict[str, str]:
    """Regions whose step this part of the model runs, but as a kernel that leaves no place for them."""
    if any(isinstance(module, Experts) and module.fused for module in model.modules()):
        return {"activation": fused_experts_reason()}
    return {}


def overlapping_spans(names: Sequence[str]) -> list[str]:
    """One problem for each region that spans steps of another that does."""
    spanning = [name for name in names if REGIONS[name].spans]
    problems: list[str] = []
    for inner in spanning:
        for outer in spanning:
            if set(REGIONS[inner].spans) < set(REGIONS[outer].spans):
                problems.append(f'region "{inner}" lies inside "{outer}", whose policy covers it: name one of the two')
    return problems


def over_steps(steps: Sequence[Step], wanted: Mapping[str, Policy]) -> list[Step]:
    """The step list in which each run of steps that a wanted region spans is one step under its policy."""
    rewritten: list[Step] = []
    position = 0
    while position < len(steps):
        region, count = region_starting_at(steps, position, wanted)
        run = steps[position : position + count]
        rewritten.append(run[0] if region is None else step_under_policy(region.name, run, wanted[region.name]))
        position += count
    return rewritten


def region_starting_at(
    steps: Sequence[Step], position: int, wanted: Mapping[str, Policy]
) -> tuple[RegionSpec | None, int]:
    """The wanted region that begins with this step and how many steps it has here; no region and 1 if none does."""
    for name in wanted:
        region = REGIONS[name]
        if steps[position].spec.name == region.spans[0]:
            return region, spanned_steps(steps[position:], region)
    return None, 1


def spanned_steps(steps: Sequence[Step], region: RegionSpec) -> int:
    """How many steps from the first on the region spans: they follow the order of its names, and a layer ends before
    the next one begins."""
    last = -1
    for count, step in enumerate(steps):
        name = step.spec.name
        if name not in region.spans or region.spans.index(name) <= last:
            return count
        last = region.spans.index(name)
    return len(steps)


def step_under_policy(name: str, steps: Sequence[Step], policy: Policy) -> Step:
    """One step that runs these steps under a policy."""

    def run_under_policy(carry: Carry) -> Carry:
        function = CarryFunction(steps, carry)
        outputs = policy.around(function, *function.inputs)
        return function.resulting_carry(outputs)

    if len(steps) == 1:
        return replace(steps[0], run=run_under_policy)
    return Step(merged_step_spec(name, [step.spec for step in steps]), run_under_policy)


class CarryFunction:
    """A run of steps as a function from the carry's differentiable tensors to the floating-point tensors that it makes.

    All else in the resulting carry is taken from the first call. It is handed over once and not held here, so that a
    policy that keeps this function for backward keeps the inputs alone.
    """

    def __init__(self, steps: Sequence[Step], carry: Carry):
        self.steps = steps
        self.leaves, self.structure = tree_flatten(carry)
        distinct = {id(leaf): leaf for leaf in self.leaves if is_differentiable(leaf)}
        self.inputs = list(distinct.values())
        numbers = {address: number for number, address in enumerate(distinct)}
        self.input_numbers = [numbers.get(id(leaf)) for leaf in self.leaves]
        self.called = False
        self.result: CarryTemplate | None = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(self.leaves, self.input_numbers, strict=True)
        leaves = [leaf if number is None else inputs[number] for leaf, number in pairs]
        carry = run_step_sequence(self.steps, tree_unflatten(leaves, self.structure))
        template = CarryTemplate(carry, inputs, leaves)
        outputs, template.outputs = tuple(template.outputs), []
        if not self.called:
            self.called, self.result = True, template
        return outputs

    def resulting_carry(self, outputs: Sequence[torch.Tensor]) -> Carry:
        template, self.result = self.result, None
        assert template is not None, "the policy did not call the function"
        return template.fill(outputs, self.inputs)


class CarryTemplate:
    """A carry with the places of a function's inputs and outputs left open."""

    def __init__(self, carry: Carry, inputs: Sequence[torch.Tensor], old_leaves: Sequence[Any]):
        leaves, self.structure = tree_flatten(carry)
        input_numbers = {id(x): number for number, x in enumerate(inputs)}
        untouched = {id(leaf) for leaf in old_leaves}
        output_numbers: dict[int, int] = {}
        self.outputs: list[torch.Tensor] = []
        self.sources: list[tuple[str, Any]] = []
        for leaf in leaves:
            if id(leaf) in input_numbers:
                self.sources.append(("input", input_numbers[id(leaf)]))
            elif id(leaf) in untouched or not is_floating_tensor(leaf):
                self.sources.append(("value", leaf))
            else:
                if id(leaf) not in output_numbers:
                    output_numbers[id(leaf)] = len(self.outputs)
                    self.outputs.append(leaf)
                self.sources.append(("output", output_numbers[id(leaf)]))

    def fill(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Carry:
        leaves: list[Any] = []
        for source, value in self.sources:
            if source == "input":
                leaves.append(inputs[value])
            elif source == "output":
                leaves.append(outputs[value])
            else:
                leaves.append(value)
        return tree_unflatten(leaves, self.structure)

    structure: TreeSpec


def is_floating_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
