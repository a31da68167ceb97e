"""The memory policies of a configuration."""

from __future__ import annotations

from collections.abc import Mapping

from moefold.anatomy.regions import layers_with_region
from moefold.comm.lanes import Lanes
from moefold.config.errors import UserError
from moefold.config.memory_regions import REGIONS, SENDING_REGIONS, parse_offload, parse_recompute, ranges_in_words
from moefold.config.run import Config, ModelConfig
from moefold.memory.copies import copier_for
from moefold.memory.dispatch_ahead import DispatchAhead
from moefold.memory.expert_chunks import attach_expert_chunks
from moefold.memory.offload import Offloader, attach_offloader
from moefold.memory.policy import RegionPolicies, attach_policies, refuse_absent_regions, regions_fused_away
from moefold.memory.recompute import Promises, Rebuild
from moefold.memory.stash import attach_row_stash
from moefold.model.transformer import Transformer

NamedLayers = Mapping[str, frozenset[int] | None]  # by region; None: all layers
KEEPS_INSIDE = ("norm", "activation", *SENDING_REGIONS)  # what these save inside is their input, or small
# Outputs of the others are inputs of the next layer.
PROMISED_OUTPUTS = ("norm", "activation", "up", "core", *SENDING_REGIONS)


def attach_configured_policies(model: Transformer, config: Config) -> None:
    """Attach the policies that `memory` names."""
    attach_recompute(model, config)
    attach_stash(model, config)
    attach_offload(model, config)
    if config.memory.expert_chunk:
        attach_expert_chunks(model, config.memory.expert_chunk)


def attach_stash(model: Transformer, config: Config) -> None:
    memory = config.memory
    if memory.stash == "none":
        return
    first_parameter = next(model.parameters())
    nbytes = int(memory.stash_gib * 2**30)
    returns = memory.stash == "pages"
    attach_row_stash(model, nbytes, returns, first_parameter.device)


def attach_offload(model: Transformer, config: Config) -> None:
    memory = config.memory
    count = layer_count(model.model)
    layers = parse_offload(memory.offload, count)
    if not layers:
        return
    refuse_missing_layers("memory.offload", layers, model.model)
    refuse_absent_regions(model, layers)
    first_parameter = next(model.parameters())
    copier = copier_for(first_parameter.device)
    limit = int(memory.offload_gib * 2**30)
    offloader = Offloader(layers, model.parameters, copier, limit, memory.offload_least)
    attach_offloader(model, offloader)


def layer_count(model: ModelConfig) -> int:
    return model.layers + model.mtp


def attach_recompute(model: Transformer, config: Config) -> None:
    count = layer_count(model.model)
    regions = parse_recompute(config.memory.recompute, count)
    refuse_missing_layers("memory.recompute", regions, model.model)
    # A fused kernel computes the activation again in any case.
    for name in regions_fused_away(model):
        regions.pop(name, None)
    if not regions:
        return
    promises = Promises()
    wanted: dict[str, Rebuild] = {}
    around_step = None
    for name in regions:
        policy = rebuild_region(name, promises, model.model)
        wanted[name] = policy
        if policy.promises_outputs:
            around_step = promises.around_step
    if "dispatch" in wanted:
        ahead = DispatchAhead(promises, wanted["dispatch"], lanes_beside_attention(model, config))
        around_step = ahead.around_step
    policies = RegionPolicies(wanted, regions, around_step)
    attach_policies(model, policies)


def lanes_beside_attention(model: Transformer, config: Config) -> Lanes | None:
    """The lanes on which tokens are sent again beside attention; None where norms gather tokens over tp."""
    if config.parallel.tp > 1:
        return None
    first_parameter = next(model.parameters())
    return Lanes(first_parameter.device)


def refuse_missing_layers(key: str, regions: NamedLayers, model: ModelConfig) -> None:
    """Refuse regions of layers of which none has them."""
    problems: list[str] = []
    for name, named in regions.items():
        present = layers_with_region(model, name)
        if named is not None and named.isdisjoint(present):
            asked = f'{key}: no region "{name}" in layers {ranges_in_words(named)}'
            have_it = ranges_in_words(present) or "none"
            problems.append(f"{asked}; layers that have it: {have_it}")
    if problems:
        raise UserError(*problems)


def rebuild_region(name: str, promises: Promises, model: ModelConfig) -> Rebuild:
    # Behind the experts only a projection back from latents saves what follows from their output.
    region = REGIONS[name]
    has_reader = model.moe.latent > 0 and "widen" in region.spans
    return Rebuild(
        promises,
        drops_saved=name not in KEEPS_INSIDE,
        promises_outputs=name in PROMISED_OUTPUTS,
        uses_expert_outputs=has_reader,
    )
