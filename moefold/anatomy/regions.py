"""The memory regions that a model has, of those in config/memory_regions.py. Torch-free.

A model lacks a region where it lacks the mechanism (no latents: no `up`), or where a fused kernel leaves no place for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from moefold.anatomy.step_specs import Lane, StepSpec, block_step_specs, fits_fused_expert_mlp, is_moe_layer
from moefold.config.memory_regions import MOE_STEPS, REGIONS, RegionSpec
from moefold.config.run import ModelConfig


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


def layers_with_region(model: ModelConfig, name: str) -> frozenset[int]:
    """The layers that have steps of a region, multi-token prediction included."""
    steps = set(REGIONS[name].steps)
    layers: set[int] = set()
    for layer in range(model.layers + model.mtp):
        names = {spec.name for spec in block_step_specs(model, layer)}
        if not steps.isdisjoint(names):
            layers.add(layer)
    return frozenset(layers)


def merged_step_spec(name: str, specs: Sequence[StepSpec], exchange_lane: Lane = "comm") -> StepSpec:
    """One step in place of a run of steps. `exchange_lane`: its lane if any of them communicates between expert
    ranks."""
    lanes = {spec.lane for spec in specs}
    ops = dict.fromkeys(op for spec in specs for op in spec.ops)
    weights = tuple(weight for spec in specs for weight in spec.weights)
    return StepSpec(
        name,
        lane=exchange_lane if "comm" in lanes else "compute",
        static=all(spec.static for spec in specs),
        shapes=f"{specs[0].shapes}; ...; {specs[-1].shapes}",
        ops=tuple(ops),
        weights=weights,
        matmul=sum(spec.matmul for spec in specs),
        context=sum(spec.context for spec in specs),
        window=max(spec.window for spec in specs),
        exchanges=sum(spec.exchanges for spec in specs),
    )
