"""Memory policies: what becomes of the tensors that a region saves between forward and backward.

A policy is called around a region's function. `Keep` leaves autograd's choice; others may rebuild, offload or compress.
Policies are attached by region name at assembly. A region inside a step calls its policy itself; for a region that
spans steps, the run of steps becomes one step that calls the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moefold.anatomy.regions import absent_regions, fused_experts_reason, merged_step_spec
from moefold.anatomy.step_specs import Lane
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.memory_regions import REGIONS, RegionLayers, RegionSpec, nested_region_problems
from moefold.layout.axes import World
from moefold.model.block import Block
from moefold.model.moe.experts import Experts
from moefold.model.mtp import MtpLayer
from moefold.model.norm import ResidualStream
from moefold.model.step_borders import is_differentiable
from moefold.model.steps import Carry, Region, Step, run_step_sequence
from moefold.model.transformer import Transformer

Function = Callable[..., Any]
Steps = Sequence[Step]
Tensors = Sequence[Tensor]
Numbers = dict[int, int]  # of inputs or outputs
Reasons = dict[str, str]  # by name of the region


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
StepWrapper = Callable[[Step], Step]


@dataclass(frozen=True)
class RegionPolicies:
    """Policies by region, for all layers or, where `layers` names the region, for some. `around_step` is applied to
    every step of the model."""

    wanted: Policies
    layers: RegionLayers = field(default_factory=dict)
    around_step: StepWrapper | None = None

    def policy_of(self, region: str, layer: int | None) -> Policy | None:
        """The policy of a region in a layer; None stands for what belongs to no layer."""
        layers = self.layers.get(region)
        if layers is not None and layer not in layers:
            return None
        return self.wanted.get(region)


WantedPolicies = Policies | RegionPolicies


def region_policies(wanted: WantedPolicies) -> RegionPolicies:
    if isinstance(wanted, RegionPolicies):
        return wanted
    return RegionPolicies(wanted)


def attach_policies(model: Transformer, wanted: WantedPolicies) -> None:
    """Attach a policy to each named region of the model, in place of those attached before. A name that is unknown,
    absent from this model, or inside another named region is refused."""
    policies = region_policies(wanted)
    check_wanted_regions(model, policies)
    # Regions inside steps call their policy; regions over steps become steps when a step list is made.
    default = Keep()
    for region, layer in regions_with_layers(model):
        own = policies.policy_of(region.name, layer)
        policy = own or default
        region.around = policy.around
    lane = lane_of_merged_exchanges(model.world)
    rewrite = partial(over_steps, wanted=policies, exchange_lane=lane)
    model.rewrite_steps = rewrite


def regions_with_layers(model: Transformer) -> Iterator[tuple[Region, int | None]]:
    """The regions inside steps, each with the number of its layer; None outside of layers."""
    layer_of: dict[Region, int] = {}
    for module in model.modules():
        if isinstance(module, MtpLayer):
            layer = module.block.layer
        elif isinstance(module, Block):
            layer = module.layer
        else:
            continue
        for inner in module.modules():
            if isinstance(inner, Region):
                layer_of[inner] = layer
    for module in model.modules():
        if isinstance(module, Region):
            yield module, layer_of.get(module)


def lane_of_merged_exchanges(world: World) -> Lane:
    """The lane of a run of steps with exchanges between expert ranks. Where attention communicates too, over tp or cp,
    both must run on one lane: two threads would issue the collectives of an axis in any order."""
    sizes = [axes.cp_tp.size for axes in world.context_axes.values()]
    attends_alone = max(sizes) == 1
    return "comm" if attends_alone else "compute"


def refuse_absent_regions(model: Transformer, names: Iterable[str]) -> None:
    """Refuse regions that this model lacks."""
    reasons = reasons_of_absence(model)
    problems: list[str] = []
    for name in names:
        if name in reasons:
            absence = absence_in_words(name, reasons[name])
            problems.append(absence)
    if problems:
        raise UserError(*problems)


def reasons_of_absence(model: Transformer) -> Reasons:
    """The regions that this model lacks, and why."""
    lacking = absent_regions(model.model, {})
    return lacking | regions_fused_away(model)


def absence_in_words(name: str, reason: str) -> str:
    return f'no region "{name}" in this model: {reason}'


def check_wanted_regions(model: Transformer, policies: RegionPolicies) -> None:
    reasons = reasons_of_absence(model)
    problems: list[str] = []
    known: RegionLayers = {}
    for name in policies.wanted:
        if name not in REGIONS:
            present = [region for region in REGIONS if region not in reasons]
            near = did_you_mean(name, present)
            listed = ", ".join(present)
            problems.append(f'no region "{printable_text(name)}"; this model has {listed}{near}')
            continue
        if name in reasons:
            absence = absence_in_words(name, reasons[name])
            problems.append(absence)
        if REGIONS[name].spans:
            known[name] = policies.layers.get(name)
    problems += nested_region_problems(known)
    if problems:
        raise UserError(*problems)


def regions_fused_away(model: Transformer) -> Reasons:
    """Regions whose step this part of the model runs, but as a kernel that leaves no place for them."""
    for module in model.modules():
        if isinstance(module, Experts) and module.fused:
            return {"activation": fused_experts_reason()}
    return {}


def over_steps(steps: Steps, wanted: WantedPolicies, exchange_lane: Lane = "comm") -> list[Step]:
    """The step list in which each run of steps that a wanted region spans is one step under its policy."""
    policies = region_policies(wanted)
    rewritten: list[Step] = []
    remaining = list(steps)
    while remaining:
        first = remaining[0]
        count = 1
        region = region_that_begins(first, policies)
        if region is None:
            rewritten.append(first)
        else:
            count = spanned_steps(remaining, region)
            spanned = remaining[:count]
            policy = policies.wanted[region.name]
            merged = step_under_policy(region, spanned, policy, exchange_lane)
            rewritten.append(merged)
        del remaining[:count]
    if policies.around_step is None:
        return rewritten
    return [policies.around_step(step) for step in rewritten]


def region_that_begins(step: Step, policies: RegionPolicies) -> RegionSpec | None:
    """The wanted region whose run of steps begins with this step."""
    for name in policies.wanted:
        region = REGIONS[name]
        first_names = region.spans[:1]  # none for a region inside a step
        if step.spec.name not in first_names:
            continue
        policy = policies.policy_of(name, step.layer)
        if policy is not None:
            return region
    return None


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


def step_under_policy(region: RegionSpec, steps: Steps, policy: Policy, exchange_lane: Lane = "comm") -> Step:
    """One step that runs these steps under a policy."""

    def run_under_policy(carry: Carry) -> Carry:
        if "stream" in region.reads:  # one tensor to keep, not two summands
            settled = carry["stream"].settled()
            stream = ResidualStream(settled)
            carry = carry | {"stream": stream}
        function = CarryFunction(steps, carry, region.reads)
        outputs = policy.around(function, *function.inputs)
        return function.resulting_carry(outputs)

    first = steps[0]
    if len(steps) == 1:
        return replace(first, run=run_under_policy)
    specs = [step.spec for step in steps]
    spec = merged_step_spec(region.name, specs, exchange_lane)
    return Step(spec, run_under_policy, first.layer)


class CarryFunction:
    """A run of steps as a function from the differentiable tensors of the carry entries that it `reads` to the
    floating-point tensors that it makes.

    All else in the resulting carry is taken from the first call. It is handed over once and not held here, and neither
    are inputs and entries that the steps do not read, so that a policy that keeps this function for backward keeps
    the inputs alone.
    """

    def __init__(self, steps: Steps, carry: Carry, reads: Sequence[str]):
        self.steps = steps
        self.leaves, self.structure = tree_flatten(carry)
        self.inputs: list[Tensor] = []
        read_entries = [carry[name] for name in reads if name in carry]
        read_leaves = tree_leaves(read_entries)
        self.read = set(map(id, read_leaves))
        numbers: Numbers = {}  # by identity
        for leaf in read_leaves:
            address = id(leaf)
            if is_differentiable(leaf) and address not in numbers:
                numbers[address] = len(self.inputs)
                self.inputs.append(leaf)
        every_identity = map(id, self.leaves)
        self.input_numbers = [*map(numbers.get, every_identity)]
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
        assert template is not None, "the policy did not call the function"
        inputs = self.inputs
        self.release()
        return template.fill(outputs, inputs)

    def release(self) -> None:
        """Let go of all that a rerun does not need, or gets from its caller."""
        self.result = None
        self.inputs = []
        for place, number in enumerate(self.input_numbers):
            leaf = self.leaves[place]
            given_anew = number is not None
            if given_anew or id(leaf) not in self.read:
                self.leaves[place] = None


class CarryTemplate:
    """A carry with the places of a function's inputs and outputs left open."""

    def __init__(self, carry: Carry, inputs: Tensors, old_leaves: Sequence[Any]):
        self.leaves, self.structure = tree_flatten(carry)
        self.outputs: list[Tensor] = []
        self.input_places: Numbers = {}  # by place in the flattened carry
        self.output_places: Numbers = {}
        input_numbers: Numbers = {}  # by identity
        output_numbers: Numbers = {}
        for number, x in enumerate(inputs):
            input_numbers[id(x)] = number
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
        # The template keeps no tensor that passes through the function.
        filled_later = self.input_places | self.output_places
        for place in filled_later:
            self.leaves[place] = None

    def fill(self, outputs: Tensors, inputs: Tensors) -> Carry:
        for place, number in self.input_places.items():
            self.leaves[place] = inputs[number]
        for place, number in self.output_places.items():
            self.leaves[place] = outputs[number]
        return tree_unflatten(self.leaves, self.structure)


def is_floating_tensor(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return False
    return leaf.is_floating_point()
