"""The memory policies of a configuration."""

from __future__ import annotations

from moefold.config.memory_regions import REGIONS, parse_recompute
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


def rebuild_region(name: str, promises: Promises, model: ModelConfig) -> Rebuild:
    # Behind the experts only a projection back from latents saves what follows from their output.
    has_reader = model.moe.latent > 0 and "widen" in REGIONS[name].spans
    return Rebuild(
        promises,
        drops_saved=name not in KEEPS_INSIDE,
        promises_outputs=name in PROMISED_OUTPUTS,
        uses_expert_outputs=has_reader,
    )
