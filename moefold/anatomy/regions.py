"""Memory regions of a model: named parts of a layer whose saved tensors a memory policy may keep, rebuild or offload.

One list for the planner, `moefold explain` and the model. Torch-free. A region lies inside steps or spans whole steps:

    step       attend               route  plan  dispatch  shared  experts      combine  add      mlp
    inside     norm up core out     norm                           activation                     norm
    spans                           [------------------------- moe ------------------------]
                                                           shared  experts                        mlp
               [---------------------------- layer ----------------------------------------]

A model lacks a region where it lacks the mechanism (no latents: no `up`), or where a fused kernel leaves no place for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moefold.anatomy.step_specs import StepSpec, fits_fused_expert_mlp, is_moe_layer
from moefold.config.run import ModelConfig

NORMED_STEPS = ("attend", "mlp", "route", "look_ahead", "set_aside", "predict")
MOE_STEPS = ("route", "narrow", "plan", "dispatch", "shared", "experts", "combine", "widen", "add")


@dataclass(frozen=True)
class RegionSpec:
    """A region lies `inside` the named steps, or it `spans` a run of steps: those of the names that the layer has."""

    name: str
    meaning: str
    inside: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        return self.inside or self.spans

    @property
    def place(self) -> str:
        """The position in words: `inside attend` or `route to widen`."""
        if self.inside:
            return f"inside {', '.join(self.inside)}"
        first = self.spans[0]
        last = self.spans[-1]
        return first if first == last else f"{first} to {last}"


REGION_LIST = (
    RegionSpec("norm", "RMSNorms before attention, MLP and experts", inside=NORMED_STEPS),
    RegionSpec("up", "latent attention: projections up from the latents, with their norms", inside=("attend",)),
    RegionSpec("core", "attention itself, from queries, keys and values to its result", inside=("attend",)),
    RegionSpec("out", "attention's projection back to the stream", inside=("attend",)),
    RegionSpec("mlp", "the MLP of dense layers", spans=("mlp",)),
    RegionSpec("shared", "shared experts", spans=("shared",)),
    RegionSpec("experts", "routed experts, all of them", spans=("experts",)),
    RegionSpec("activation", "the activation inside routed experts", inside=("experts",)),
    RegionSpec("moe", "all of an MoE layer behind its norm", spans=MOE_STEPS),
    RegionSpec("layer", "a whole layer: only its input is kept", spans=("attend", "mlp", *MOE_STEPS)),
)
REGIONS = {region.name: region for region in REGION_LIST}


def regions_of(model: ModelConfig, kernels: Mapping[str, str]) -> dict[str, RegionSpec]:
    """The regions that a model has, with those of their steps that it has. `kernels` names the implementation of each
    op."""
    absent = absent_regions(model, kernels)
    steps = set(model_step_names(model))
    present: dict[str, RegionSpec] = {}
    for name, region in REGIONS.items():
        if name not in absent:
            inside = tuple(step for step in region.inside if step in steps)
            spans = tuple(step for step in region.spans if step in steps)
            present[name] = replace(region, inside=inside, spans=spans)
    return present


def absent_regions(model: ModelConfig, kernels: Mapping[str, str]) -> dict[str, str]:
    """The regions that a model lacks, each with the reason."""
    steps = set(model_step_names(model))
    absent: dict[str, str] = {}
    for name, region in REGIONS.items():
        if steps.isdisjoint(region.steps):
            absent[name] = f"no layer of this model has a step {' or '.join(region.steps)}"
    if model.attention.kind != "mla":
        absent["up"] = f"attention is {model.attention.kind}: keys and values do not come from a latent"
    implementation = kernels.get("expert_mlp", "reference")
    if "experts" in steps and fits_fused_expert_mlp(model) and implementation != "reference":
        absent["activation"] = fused_experts_reason(implementation)
    return absent


def fused_experts_reason(implementation: str = "") -> str:
    """The reason for which experts that run as one kernel have no activation region."""
    kernel = f"expert_mlp: {implementation}" if implementation else "expert_mlp"
    return (
        f"the experts run as one fused kernel ({kernel}), which saves no separate activation; "
        'take region "experts", or --kernels.force expert_mlp=reference'
    )


def model_step_names(model: ModelConfig) -> Iterator[str]:
    """The names of the steps that the model has anywhere."""
    yield from ("embed", "attend", "predict")
    if model.mtp:
        yield from ("look_ahead", "set_aside")
    layers = range(model.layers + model.mtp)
    moe_layers = [is_moe_layer(model, layer) for layer in layers]
    if not all(moe_layers):
        yield "mlp"
    if not any(moe_layers):
        return
    moe = model.moe
    optional = {"narrow": moe.latent, "widen": moe.latent, "shared": moe.shared_ffn, "add": moe.shared_ffn}
    for name in MOE_STEPS:
        if optional.get(name, True):
            yield name


def merged_step_spec(name: str, specs: Sequence[StepSpec]) -> StepSpec:
    """One step in place of a run of steps. Its lane is comm if any of them communicates between expert ranks."""
    lanes = {spec.lane for spec in specs}
    ops = dict.fromkeys(op for spec in specs for op in spec.ops)
    weights = tuple(weight for spec in specs for weight in spec.weights)
    return StepSpec(
        name,
        lane="comm" if "comm" in lanes else "compute",
        static=all(spec.static for spec in specs),
        shapes=f"{specs[0].shapes}; ...; {specs[-1].shapes}",
        ops=tuple(ops),
        weights=weights,
        matmul=sum(spec.matmul for spec in specs),
        context=sum(spec.context for spec in specs),
        window=max(spec.window for spec in specs),
        exchanges=sum(spec.exchanges for spec in specs),
    )
