"""The memory policies of a configuration."""

from __future__ import annotations

from moefold.anatomy.regions import layers_with_region
from moefold.config.errors import UserError
from moefold.config.memory_regions import REGIONS, RegionLayers, parse_recompute, ranges_in_words
from moefold.config.run import Config, ModelConfig
from moefold.memory.policy import RegionPolicies, attach_policies, regions_fused_away
from moefold.memory.recompute import Promises, Rebuild
from moefold.model.transformer import Transformer

KEEPS_INSIDE = ("norm", "activation")  # what these save inside is their input, or small
PROMISED_OUTPUTS = ("norm", "activation", "up", "core")  # the others' outputs are inputs of the next layer


def attach_configured_policies(model: Transformer, config: Config) -> None:
    """Attach the policies that `memory` names."""
    layers = model.model.layers + model.model.mtp
    regions = parse_recompute(config.memory.recompute, layers)
    refuse_missing_layers(regions, model.model)
    # A fused kernel computes the activation again in any case.
    for name in regions_fused_away(model):
        regions.pop(name, None)
    if not regions:
        return
    promises = Promises()
    wanted = {name: rebuild_region(name, promises, model.model) for name in regions}
    promising = any(policy.promises_outputs for policy in wanted.values())
    around_step = promises.around_step if promising else None
    attach_policies(model, RegionPolicies(wanted, regions, around_step))


def refuse_missing_layers(regions: RegionLayers, model: ModelConfig) -> None:
    """Refuse regions of layers of which none has them."""
    problems: list[str] = []
    for name, named in regions.items():
        present = layers_with_region(model, name)
        if named is not None and named.isdisjoint(present):
            asked = f'memory.recompute: no region "{name}" in layers {ranges_in_words(named)}'
            problems.append(f"{asked}; layers that have it: {ranges_in_words(present) or 'none'}")
    if problems:
        raise UserError(*problems)


def rebuild_region(name: str, promises: Promises, model: ModelConfig) -> Rebuild:
    # Behind the experts only a projection back from latents saves what follows from their output.
    has_reader = model.moe.latent > 0 and "widen" in REGIONS[name].spans
    return Rebuild(
        promises,
        drops_saved=name not in KEEPS_INSIDE,
        promises_outputs=name in PROMISED_OUTPUTS,
        uses_expert_outputs=has_reader,
    )
