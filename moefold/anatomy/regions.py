"""The memory regions that a model has, of those in config/memory_regions.py. Torch-free.

A model lacks a region where it lacks the mechanism (no latents: no `up`), or where a fused kernel leaves no place for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from moefold.anatomy.step_specs import Lane, StepSpec, WeightSpec, block_step_specs, fits_fused_expert_mlp, is_moe_layer
from moefold.config.memory_regions import MOE_STEPS, REGIONS, RegionSpec
from moefold.config.run import ModelConfig


def regions_of(model: ModelConfig, kernels: Mapping[str, str]) -> dict[str, RegionSpec]:
    """The regions that a model has, with those of their steps that it has. `kernels` names the implementation of each
    op."""
    absent = absent_regions(model, kernels)
    steps = set(model_step_names(model))
    present: dict[str, RegionSpec] = {}
    for name, region in REGIONS.items():
        if name in absent:
            continue
        inside = filter(steps.__contains__, region.inside)
        spans = filter(steps.__contains__, region.spans)
        present[name] = replace(region, inside=tuple(inside), spans=tuple(spans))
    return present


def absent_regions(model: ModelConfig, kernels: Mapping[str, str]) -> dict[str, str]:
    """The regions that a model lacks, each with the reason."""
    steps = set(model_step_names(model))
    absent: dict[str, str] = {}
    for name, region in REGIONS.items():
        if steps.isdisjoint(region.steps):
            missing = " or ".join(region.steps)
            absent[name] = f"no layer of this model has a step {missing}"
    attention = model.attention.kind
    if attention != "mla":
        absent["up"] = f"attention is {attention}: keys and values do not come from a latent"
    implementation = kernels.get("expert_mlp", "reference")
    is_fused = fits_fused_expert_mlp(model) and implementation != "reference"
    if "experts" in steps and is_fused:
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
    latent = model.moe.latent
    shared = model.moe.shared_ffn
    optional = {"narrow": latent, "widen": latent, "shared": shared, "add": shared}
    for name in MOE_STEPS:
        if optional.get(name, True):
            yield name


def layers_with_region(model: ModelConfig, name: str) -> frozenset[int]:
    """The layers that have steps of a region, multi-token prediction included."""
    steps = set(REGIONS[name].steps)
    layers: set[int] = set()
    for layer in range(model.layers + model.mtp):
        block = block_step_specs(model, layer)
        names = [spec.name for spec in block]
        if not steps.isdisjoint(names):
            layers.add(layer)
    return frozenset(layers)


def merged_step_spec(name: str, specs: Sequence[StepSpec], exchange_lane: Lane = "comm") -> StepSpec:
    """One step in place of a run of steps. `exchange_lane`: its lane if any of them communicates between expert
    ranks."""
    lanes = {spec.lane for spec in specs}
    ops: dict[str, None] = {}  # distinct ones, in order
    weights: list[WeightSpec] = []
    for spec in specs:
        ops |= dict.fromkeys(spec.ops)
        weights += spec.weights
    return StepSpec(
        name,
        lane=exchange_lane if "comm" in lanes else "compute",
        static=all(spec.static for spec in specs),
        shapes=f"{specs[0].shapes}; ...; {specs[-1].shapes}",
        ops=tuple(ops),
        weights=tuple(weights),
        matmul=sum(spec.matmul for spec in specs),
        context=sum(spec.context for spec in specs),
        window=max(spec.window for spec in specs),
        exchanges=sum(spec.exchanges for spec in specs),
    )
