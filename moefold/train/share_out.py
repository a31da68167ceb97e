"""The model's parameters shared out among replicas: buckets, gradients and the weights of other ranks, by `shard.mode`.

zero1    weights are whole on every rank, and updated shares are gathered after a step (shard/publish.py)
zero3    weights are shares, and units are gathered around the steps that use them (shard/gathered_units.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from moefold.anatomy.stage_contents import embedding_ranks, final_norm_ranks
from moefold.anatomy.weight_units import units_at_a_time
from moefold.comm.consensus import raise_first_problem
from moefold.comm.host_objects import union_of_sets
from moefold.config.errors import UserError
from moefold.config.run import Config, OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.add_in_blocks import add_in_blocks
from moefold.kernels.optimizer.add_squares import add_squares
from moefold.kernels.quantise.payload_ops import payload_ops
from moefold.layout.axes import World
from moefold.model.initialise import fill_parameters
from moefold.model.steps import Around
from moefold.model.transformer import Transformer
from moefold.observe.trace import SpanRecorder
from moefold.optim.parameter_groups import ParameterGroups
from moefold.pipeline.last_gradients import stages_using_parameters
from moefold.precision.low_rank import start_magnitudes, without_adapters
from moefold.precision.recipes import weight_formats
from moefold.shard.buckets import Bucket, FillParameters, UnitOf, block_of_parameter, fill_buckets
from moefold.shard.fp8_weights import Fp8Storage
from moefold.shard.gathered_units import GatheredUnits, unit_of_parameter
from moefold.shard.gradients import Gradients
from moefold.shard.publish import Publisher
from moefold.shard.storage import sharded_storage_maker, storage_maker
from moefold.shard.unit_gradients import UnitGradients

WeightFiller = Callable[[Transformer], None]


class SharedOut(NamedTuple):
    """A model shared out. `around`: what is called around every step of the model."""

    buckets: list[Bucket]
    gradients: Gradients
    parameters: Publisher | GatheredUnits
    around: tuple[Around, ...] = ()


def share_out_model(
    config: Config,
    model: Transformer,
    world: World,
    groups: ParameterGroups,
    kernels: BoundKernels,
    spans: SpanRecorder,
    weights: WeightFiller | None = None,
) -> SharedOut:
    """Share out the parameters of a model. With zero3 they have no memory yet: they are drawn by name and seed, or
    filled by `weights`."""
    made_for = replace(world.shard, mode=config.shard.mode)
    if made_for != config.shard:
        raise ValueError(f"a world made for {world.shard}; expected one for {config.shard}")
    choose_trained_parameters(model, world, groups)
    if config.lora.rank:
        raise_first_problem(stage_without_adapters(model), world)
    if config.shard.mode == "zero3":
        return share_out_units(config, model, world, groups, kernels, spans, weights)
    unit = block_of_parameter if has_units(config.optim) else None
    fp8 = fp8_storage(config, model, kernels)
    fill = configured_filler(config, model, world, groups)
    buckets = fill(unit=unit, fp8=fp8, add_in_blocks=kernels[add_in_blocks])
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # what parameters had before they moved into buckets
    payloads = payload_ops(kernels)
    gradients = Gradients(buckets, world, gradient_reduction(config), kernels[add_squares], payloads)
    updates_are_late = config.optim.states == "host" and world.device.type == "cuda"
    return SharedOut(buckets, gradients, Publisher(model, buckets, updates_are_late))


def share_out_units(
    config: Config,
    model: Transformer,
    world: World,
    groups: ParameterGroups,
    kernels: BoundKernels,
    spans: SpanRecorder,
    weights: WeightFiller | None,
) -> SharedOut:
    unit_of = units_of_model(model)
    fill = first_values(config, weights)
    sharded = sharded_storage_maker(config.optim.main)
    fp8 = fp8_storage(config, model, kernels)
    fill_units = partial(configured_filler(config, model, world, groups), unit=unit_of, sharded=sharded, fill=fill)
    buckets = fill_units(fp8=fp8)
    frozen = fill_units(frozen=True)
    if weights is not None:
        with without_adapters(model):  # of which published weights know nothing
            weights(model)
    stages: dict[int, set[str]] = {stage.number: set() for stage in model.stages}
    for name, (users, _) in stages_using_parameters(model).items():
        for stage in users:
            stages[stage].add(unit_of(name))
    reduction = gradient_reduction(config)
    payloads = payload_ops(kernels)
    gradients = UnitGradients(buckets, world, reduction, kernels[add_squares], stages, spans, payloads)
    most = units_at_a_time(config.pipeline)
    units = GatheredUnits(model, [*buckets, *frozen], gradients, spans, most)
    start_gathered_magnitudes(model, units, unit_of)
    return SharedOut(buckets, gradients, units, (units,))


def share_out_frozen(
    config: Config,
    model: Transformer,
    world: World,
    groups: ParameterGroups,
    gradients: Gradients,
    spans: SpanRecorder,
    weights: WeightFiller | None,
) -> tuple[Around, ...]:
    """Share out a second model, which is frozen, as the first one is. Returns what brings its weights to its steps;
    nothing where they are whole."""
    if config.shard.mode != "zero3":
        return ()
    assert isinstance(gradients, UnitGradients)
    unit_of = units_of_model(model)
    fill = first_values(config, weights)
    sharded = sharded_storage_maker(config.optim.main)
    fill_units = configured_filler(config, model, world, groups)
    buckets = fill_units(unit=unit_of, sharded=sharded, fill=fill, frozen=True)
    if weights is not None:
        weights(model)
    units = GatheredUnits(model, buckets, gradients, spans)
    return (units,)


def first_values(config: Config, weights: WeightFiller | None) -> FillParameters | None:
    """What draws weights as they get memory; None where `weights` fill them later."""
    if weights is not None:
        return None
    return partial(fill_parameters, seed=config.train.seed)


def start_gathered_magnitudes(model: Transformer, units: GatheredUnits, unit_of: UnitOf) -> None:
    """Magnitudes as the rows of weights are long, a unit at a time."""

    def gather_unit(name: str) -> None:
        units.require([unit_of(name)])

    start_magnitudes(model, gather_unit)
    units.free_all()  # which have no magnitudes yet


def gradient_reduction(config: Config) -> str:
    """The name of the reduction of gradients between ranks."""
    reduction = config.optim.gradient_reduce
    if reduction == "fp8" and config.precision.power_of_two_scales:
        return "fp8 by powers of two"
    return reduction


def configured_filler(config: Config, model: Transformer, world: World, groups: ParameterGroups):
    """`fill_buckets` with what the configuration says of buckets in either mode."""
    return partial(
        fill_buckets,
        model,
        world,
        held=pipeline_shared_weights(config),
        gradients=config.optim.gradients,
        group=groups.group_of,
        storage=storage_maker(config.optim.main),
        cost=groups.cost_of,
    )


def units_of_model(model: Transformer) -> UnitOf:
    """The unit of each parameter that this rank holds."""
    names = [name for name, _ in model.named_modules()]
    held = frozenset(names)
    return partial(unit_of_parameter, held=held, tied_head=model.model.tied_head)


def has_units(optim: OptimConfig) -> bool:
    """Whether layers are updated or clipped one by one."""
    return optim.when == "backward" or optim.clip_by == "unit"


def choose_trained_parameters(model: Transformer, world: World, groups: ParameterGroups) -> None:
    """Freeze the parameters that groups name so, beside those that adapters have frozen. A pattern may match on other
    pipeline ranks only."""
    if groups.entries:
        names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        groups.require_matches(union_of_sets(names, world.pp))
        groups.freeze_parameters(model)


def stage_without_adapters(model: Transformer) -> UserError | None:
    """The refusal of a pipeline stage that has nothing to train: it would have no gradient to send back."""
    trained = stages_using_parameters(model)
    used = {stage for stages, _ in trained.values() for stage in stages}
    for stage in model.stages:
        if stage.number not in used:
            return UserError(
                f"pipeline stage {stage.number} has no adapter that is trained; expected one on every stage: name "
                "products of its layers in lora.targets, or set parallel.pp, pipeline.vpp or pipeline.layout otherwise"
            )
    return None


def fp8_storage(config: Config, model: Transformer, kernels: BoundKernels) -> Fp8Storage | None:
    if config.precision.storage != "fp8":
        return None
    return Fp8Storage(weight_formats(model), kernels, config.optim.main)


def pipeline_shared_weights(config: Config) -> dict[str, tuple[int, ...]]:
    """Parameters of which several pipeline ranks hold copies."""
    ranks = {
        "embedding.weight": embedding_ranks(config),
        "head.norm.weight": final_norm_ranks(config),
    }
    return {name: tuple(holders) for name, holders in ranks.items() if len(holders) > 1}
