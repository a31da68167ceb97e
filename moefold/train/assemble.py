"""Assembly of a run: the only place where a configuration becomes objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moefold.anatomy.adapters import adapter_specs
from moefold.anatomy.frozen_base import base_products
from moefold.anatomy.host_experts import experts_on_host
from moefold.anatomy.products import product_recipes
from moefold.anatomy.stage_contents import pipeline_stages, rank_of_each_stage
from moefold.checkpoint.live.logical_tensors import StateProvider
from moefold.comm.collectives import all_gather, bind_collective, reduce_scatter
from moefold.comm.consensus import raise_first_problem
from moefold.comm.host_objects import broadcast_object
from moefold.config.base_formats import BASE_FORMATS
from moefold.config.context_sending import keys_by_size
from moefold.config.errors import UserError
from moefold.config.rules import check_config
from moefold.config.run import TRAINED, Config
from moefold.data.corpus import Corpus
from moefold.data.dynamic_context import context_shape
from moefold.data.flops_price import FlopsPrice
from moefold.data.loader import BatchLoader, RegroupedLoader
from moefold.data.packed_sequences import PackedSequences
from moefold.data.prepared_corpus import PreparedCorpus
from moefold.data.regrouped_samples import RegroupedSamples, largest_group_length
from moefold.data.run_corpus import open_corpus, tokenizer_of_run
from moefold.data.sequences import Sequences
from moefold.data.tokenizer import Tokenizer
from moefold.dispatch.build import build_dispatcher, choose_dispatcher
from moefold.dispatch.projection_arena import build_tiled_heads, build_tiled_projections
from moefold.dispatch.room_sizes import tokens_per_rank
from moefold.kernels.attention.autotune import known_or_measured_times
from moefold.kernels.attention.timings import known_times, remember_times
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts, facts_from_config, training_precision
from moefold.layout.agreement import Terms, code_versions, comparable_settings, differences
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters, parameters_without_memory
from moefold.layout.dtypes import DTYPES
from moefold.memory.choose import attach_configured_policies
from moefold.memory.graphs import StepGraph, make_step_graph
from moefold.memory.host_experts import fetch_experts, hold_experts_on_host
from moefold.memory.static_graphs import StaticGraphs, make_static_graphs
from moefold.model.attention.attention_base import HeadsOverTp
from moefold.model.attention.context_parallel import choose_context_mechanisms
from moefold.model.heads_in_exchanges import HeadsInExchanges
from moefold.model.initialise import allocate_parameters, fill_parameters, initialise_parameters
from moefold.model.objective import Preferences
from moefold.model.parts import ModelParts
from moefold.model.projections_in_exchanges import ProjectionsInExchanges
from moefold.model.steps import inside_recompute
from moefold.model.transformer import Transformer
from moefold.observe.trace import SpanRecorder
from moefold.optim.loss_scale import LossScale, make_loss_scale
from moefold.optim.optimizer import Optimizer
from moefold.optim.parameter_groups import ParameterGroups
from moefold.optim.qk_clip import QkClip
from moefold.optim.spike_judge import SpikeJudge
from moefold.optim.step_scalars import StepScalars
from moefold.optim.update_times import UpdateTimes, make_update_times
from moefold.pipeline.executor import Executor
from moefold.plan.time.run_context import choose_context
from moefold.precision.base_blocks import hold_base
from moefold.precision.fp8_scatter_sum import fp8_sums_over_tp
from moefold.precision.linear import ProjectionsByCollectives, TpProjections
from moefold.precision.low_rank import attach_adapters, start_magnitudes, without_adapters
from moefold.precision.operand_statistics import OperandStatistics
from moefold.precision.recipes import RecipeState, attach_recipes
from moefold.precision.scale_histories import ScaleHistories
from moefold.shard.clipping import PreviousNormClipping, make_clipping
from moefold.shard.gathered_units import GatheredUnits
from moefold.shard.gradients import Gradients
from moefold.shard.publish import Publisher
from moefold.shard.weight_checksums import WeightChecksums
from moefold.train.context_sending import resolve_sending
from moefold.train.reference import FrozenWeights, Reference
from moefold.train.routing_replay import open_replay
from moefold.train.row_guard import NoBounds, StepGuard, make_row_guard
from moefold.train.run_vocabulary import open_run_tokenizer
from moefold.train.share_out import SharedOut, share_out_frozen, share_out_model


def unobserved_phase(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Run:
    """Everything a training run works with. `step` counts the steps that were begun."""

    config: Config
    world: World
    out: Path
    tokenizer: Tokenizer
    loader: BatchLoader
    validation: BatchLoader
    model: Transformer
    gradients: Gradients
    executor: Executor
    optimizer: Optimizer
    qk_clip: QkClip
    updates: UpdateTimes
    parameters: Publisher | GatheredUnits
    loss_scale: LossScale
    scale_histories: ScaleHistories
    operand_statistics: OperandStatistics
    further_state: dict[str, StateProvider]  # saved in checkpoints too
    skipped_text: tuple[str, ...]  # what data.skip_bad left out
    context_reason: str  # empty where no ranks share a sequence
    dispatcher_reason: str
    pace: StepScalars  # the learning rate as a share of its peak
    graph: StepGraph[Any] | None = None  # of the step; None: every step is launched anew
    static_graphs: StaticGraphs | None = None  # of steps of the model whose shapes do not depend on routing
    spikes: SpikeJudge | None = None  # None: spikes are not looked for
    reference: Reference | None = None  # that the objective compares with; None: with nothing
    row_guard: StepGuard = field(default_factory=NoBounds)
    checksums: WeightChecksums | None = None  # of weights, to compare replicas; None: they are not compared
    step: int = 0
    before_update: Callable[[], None] = lambda: None  # waits for readers of the weights, such as a checkpoint
    phase: Callable[[str], AbstractContextManager[object]] = unobserved_phase  # around each phase of train_step

    @property
    def is_observed(self) -> bool:
        """Whether something looks into the next step, which a replay would hide from it."""
        records = self.operand_statistics.is_recorded(self.step + 1)
        looks_inside = bool(self.executor.around) or self.phase is not unobserved_phase
        return records or looks_inside or bool(self.config.observe.fault)


def assemble_run(
    config: Config,
    world: World,
    out: Path,
    corpus: Corpus | None = None,
    weights: Callable[[Transformer], None] | None = None,
    adapters: Callable[[Transformer], None] | None = None,
    vocabulary: str | None = None,
) -> Run:
    """Build everything a run needs. `corpus` replaces the text that the configuration names; `weights` fills the model
    with given weights instead of random ones, `adapters` its adapters; `vocabulary` is a tokenizer.json that the run
    has trained."""
    config = resolve_auto_values(config, world)
    config = resolve_tokenizer(config, corpus)
    config = check_config(config, world.size)
    require_agreement(comparable_settings(config) | code_versions(), world)
    config, context_reason = resolve_context(config, world)
    config, dispatcher_reason = resolve_dispatcher(config, world)
    torch.manual_seed(config.train.seed)
    tokenizer = open_run_tokenizer(config, world, out, vocabulary)
    text = corpus or open_corpus(config.data, tokenizer, config.model.vocab)
    if world.size > 1:
        require_agreement({"fingerprint of the data": text.fingerprint()}, world)
    kernels = choose_kernels(config, world)
    config = with_sending(config, kernels, world)
    loader, validation = make_loaders(config, text, world)
    model = build_model(config, world, kernels, weights, adapters)
    loader.replay = open_replay(config, model, world)
    groups = ParameterGroups(config.optim, kernels)
    loss_scale = make_loss_scale(config, world.device)
    clipping = make_clipping(config.optim.clip_by, config.optim.max_norm, world.device)
    further_state: dict[str, StateProvider] = {"precision": RecipeState(model), "precision.loss_scale": loss_scale}
    if isinstance(clipping, PreviousNormClipping):
        further_state["clipping"] = clipping
    spikes = make_spike_judge(config, world)
    if spikes is not None:
        further_state["spikes"] = spikes
    judges = [further_state[name] for name in ("clipping", "spikes") if name in further_state]
    spans = SpanRecorder(world.rank)
    frozen = make_frozen_copy(config, world, kernels, weights)
    if frozen is not None:
        further_state["reference"] = FrozenWeights(frozen)
    shared = share_out_model(config, model, world, groups, kernels, spans, weights)
    gradients = shared.gradients
    optimizer = Optimizer(shared.buckets, groups.rules)
    static_graphs = make_static_graphs(config.memory.graphs, model, world.device)
    if static_graphs is not None:
        bind_static_graphs(static_graphs, shared)
    around = (*shared.around, *fetch_experts(config, model, spans))
    executor = Executor(config, model, gradients, world, spans, around)
    reading = executor
    if frozen is not None:
        brings_weights = share_out_frozen(config, frozen, world, groups, gradients, spans, weights)
        reading = Executor(config, frozen, gradients, world, spans, brings_weights)
    return Run(
        config=config,
        world=world,
        out=out,
        tokenizer=tokenizer,
        loader=loader,
        validation=validation,
        model=model,
        gradients=gradients,
        executor=executor,
        optimizer=optimizer,
        qk_clip=QkClip(model, optimizer, config.optim.qk_clip, kernels, world),
        updates=make_update_times(config.optim.when, gradients, clipping, optimizer),
        parameters=shared.parameters,
        loss_scale=loss_scale,
        scale_histories=ScaleHistories(model, world),
        operand_statistics=OperandStatistics(model, world, config.observe.fp8_every, inside_recompute),
        further_state=further_state,
        skipped_text=text.skipped,
        context_reason=context_reason,
        dispatcher_reason=dispatcher_reason,
        pace=StepScalars([[1.0]], world.device),
        graph=make_step_graph(config, world),
        static_graphs=static_graphs,
        spikes=spikes,
        reference=make_reference(config, reading),
        row_guard=make_row_guard(model, loss_scale, judges, world),
        checksums=WeightChecksums(shared.buckets, model, world.device) if config.observe.compare_every else None,
    )


def bind_static_graphs(graphs: StaticGraphs, shared: SharedOut) -> None:
    """Let graphs find gradients in their places, and wait for weights from other ranks."""
    assert isinstance(shared.parameters, Publisher), "weights that are gathered have no places"
    shared.gradients.stay_in_place()
    graphs.weights = shared.parameters


def make_frozen_copy(
    config: Config,
    world: World,
    kernels: BoundKernels,
    weights: Callable[[Transformer], None] | None,
) -> Transformer | None:
    """The model as the run begins with it, to compare with; None where adapters can be left out instead, or nothing is
    compared. It has no backward, and so no exchanges of its own inside projections."""
    if config.train.objective != "dpo" or config.lora.rank:
        return None
    by_collectives = replace(config.parallel, tiles=())
    return build_model(replace(config, parallel=by_collectives), world, kernels, weights)


def make_reference(config: Config, executor: Executor) -> Reference | None:
    objective = executor.model.objective
    if not isinstance(objective, Preferences):
        return None
    as_reference = partial(without_adapters, executor.model) if config.lora.rank else nullcontext
    return Reference(executor, objective, as_reference)


def make_spike_judge(config: Config, world: World) -> SpikeJudge | None:
    deviations = config.observe.spike
    skips = config.train.skip_spikes
    return SpikeJudge(deviations, skips, world.device) if deviations else None


def require_agreement(mine: Terms, world: World) -> None:
    """Refuse ranks with different settings, code or data, before the first step."""
    first = broadcast_object(mine, world.everyone)
    problems = differences(mine, first, world.rank)
    raise_first_problem(UserError(*problems) if problems else None, world)


def resolve_auto_values(config: Config, world: World) -> Config:
    """The configuration with every `auto` replaced by the value for this machine."""
    device = world.device.type
    precision = training_precision(device, config)
    train = replace(config.train, device=device, precision=precision)
    return replace(config, train=train)


def resolve_context(config: Config, world: World) -> tuple[Config, str]:
    """The configuration with the mechanism of context parallelism of the run in place of `auto`, and the reason: rank
    0's, since nodes may have different cards."""
    choice = choose_context(config, world.size, world.device.type, world.node_size)
    first = broadcast_object((choice.config.parallel.context, choice.why), world.everyone)
    context, reason = first
    parallel = replace(config.parallel, context=context)
    return replace(config, parallel=parallel), reason


def resolve_dispatcher(config: Config, world: World) -> tuple[Config, str]:
    """The configuration with the dispatcher of the run in place of `auto`, and the reason. With all experts on each
    rank there is none to name."""
    name, reason = choose_dispatcher(config, world)
    if name == "local":
        return config, reason
    parallel = replace(config.parallel, dispatcher=name)
    return replace(config, parallel=parallel), reason


def with_sending(config: Config, kernels: BoundKernels, world: World) -> Config:
    """The configuration with what groups of dynamic context send, measured if it is not set."""
    sending = resolve_sending(config, kernels, world)
    parallel = replace(config.parallel, context_sending=sending)
    return replace(config, parallel=parallel)


def resolve_tokenizer(config: Config, corpus: Corpus | None) -> Config:
    """The configuration with the tokenizer of its text. A given corpus has no text: its samples are shown as bytes."""
    if config.data.tokenizer in ("auto", TRAINED) and corpus is not None:
        tokenizer = "byte"
    else:
        tokenizer = tokenizer_of_run(config.data, config.model.vocab)
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def make_loaders(config: Config, corpus: Corpus | PreparedCorpus, world: World) -> tuple[BatchLoader, BatchLoader]:
    """The loaders of training and of validation, which reads windows with any packing, but whole preferences."""
    train = config.train
    where = (world.axis("dp"), world.device)
    is_packed = config.data.packing != "windows"
    make_sequences = corpus.packed_sequences if is_packed else corpus.train_sequences
    sequences = make_sequences(config.data, train.seed, train.global_batch)
    held_out = corpus.held_out_sequences(config.data)
    loader = BatchLoader(sequences, train.global_batch, *where)
    if config.parallel.context_sizes == "dynamic":
        loader = RegroupedLoader(regroup_samples(config, sequences, world), train.global_batch, *where)
    validation = BatchLoader(held_out, train.validate_sequences, *where)
    return loader, validation


def regroup_samples(config: Config, sequences: Sequences, world: World) -> RegroupedSamples:
    assert isinstance(sequences, PackedSequences), "a rule asks for packed samples"
    shape = context_shape(config, world.dp_cp.size)
    sent_keys = keys_by_size(config.parallel.context_sending, shape.sizes)
    price = FlopsPrice(config.model, sent_keys)
    return RegroupedSamples(sequences, shape, price, world.dp_cp.index, world.tp.size)


def choose_kernels(config: Config, world: World) -> BoundKernels:
    capability = device_capability(world.device)
    facts = facts_from_config(config, world.device.type, config.train.precision, capability)
    share_attention_timings(facts, world)
    return BoundKernels(facts, config.kernels.force)


def device_capability(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return 0, 0


def share_attention_timings(facts: Facts, world: World) -> None:
    """How long the ways of attending take on this card, if the choice depends on it: the same on every rank."""
    own = known_or_measured_times(facts)
    times = broadcast_object(own, world.everyone)
    if facts.attention is None or not times:
        return
    if times != known_times(facts.capability, facts.attention):
        remember_times(facts.capability, facts.attention, times)


def build_model(
    config: Config,
    world: World,
    kernels: BoundKernels,
    start: Callable[[Transformer], None] | None = None,
    adapters: Callable[[Transformer], None] | None = None,
) -> Transformer:
    """This rank's part of the model on its device in its precision, initialised by name and seed, or filled by `start`,
    which gives every parameter its value, and by `adapters`, which fills adapters. With zero3 parameters have no memory
    until they are shared out; those of a base in blocks never have, those of experts on the host only in steps."""
    choices = make_model_parts(config, world, kernels)
    here = world.axis("pp").index
    homes = rank_of_each_stage(config)
    stages = [stage for stage, home in zip(pipeline_stages(config), homes, strict=True) if home == here]
    is_whole = config.shard.mode == "zero1"
    base = BASE_FORMATS.get(config.lora.base)
    on_host = [product for layer in experts_on_host(config) for product in layer.products]
    with world.device, default_dtype(DTYPES[config.train.precision]), parameters_without_memory():
        model = Transformer(config.model, choices, stages)
    if config.train.objective == "dpo":
        model.objective = Preferences(config.train.dpo_beta)
    recipe_of = {chosen.product.name: chosen.recipe for chosen in product_recipes(config)}
    attach_recipes(model, recipe_of, kernels, config.precision, held_elsewhere=recipe_of)
    if base is not None:
        hold_base(model, base, [product.name for product in base_products(config)], kernels)
    if on_host:
        hold_experts_on_host(model, on_host, in_shares=not is_whole)
    if is_whole:
        allocate_parameters(model)
    if is_whole and start is not None:
        start(model)
    elif is_whole:
        initialise_parameters(model, config.train.seed)
    add_adapters(model, config, world, kernels, adapters)  # behind the start, which may know of no adapters
    attach_configured_policies(model, config)
    return model


def add_adapters(
    model: Transformer,
    config: Config,
    world: World,
    kernels: BoundKernels,
    start: Callable[[Transformer], None] | None,
) -> None:
    """Adapters of this rank's products, initialised by name and seed as weights are, then filled by `start` if there is
    one; all else is frozen."""
    specs = adapter_specs(config)
    if not specs:
        return
    with world.device, default_dtype(DTYPES[config.train.precision]):
        attach_adapters(model, specs, kernels)
    adapters = [each for each in declared_parameters(model) if each.tensor.requires_grad]
    fill_parameters(adapters, config.train.seed)
    if start is not None:
        start(model)
    if config.shard.mode == "zero1":
        start_magnitudes(model)


def make_model_parts(config: Config, world: World, kernels: BoundKernels) -> ModelParts:
    contexts = choose_context_mechanisms(config.parallel.context, kernels, world)
    dispatcher = build_dispatcher(config, kernels, world)
    over_tp = make_tp_projections(config, world, kernels)
    heads = make_heads_in_exchanges(config, world, kernels, over_tp)
    row_chunks = config.parallel.row_chunks
    return ModelParts(world, kernels, dispatcher, contexts, over_tp, longest_row(config, world), row_chunks, heads)


def make_tp_projections(config: Config, world: World, kernels: BoundKernels) -> TpProjections:
    tp = world.axis("tp")
    gather_rows = bind_collective(all_gather, tp)
    scatter_sums = fp8_sums_over_tp(world, config.precision, kernels) or bind_collective(reduce_scatter, tp)
    by_collectives = ProjectionsByCollectives(gather_rows, scatter_sums)
    if "projections" not in config.parallel.tiles:
        return by_collectives
    tiled = build_tiled_projections(config, kernels, world)
    return ProjectionsInExchanges(tiled, tokens_per_rank(config), by_collectives)


def make_heads_in_exchanges(
    config: Config, world: World, kernels: BoundKernels, over_tp: TpProjections
) -> HeadsInExchanges | None:
    if "heads" not in config.parallel.tiles:
        return None
    tiled = build_tiled_heads(config, kernels, world)
    return HeadsInExchanges(tiled, tokens_per_rank(config), HeadsOverTp(over_tp))


def longest_row(config: Config, world: World) -> int:
    """The longest sequence of tokens that a microbatch may have."""
    if config.parallel.context_sizes == "fixed":
        return config.data.seq_len
    return largest_group_length(config, world.dp_cp.size)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
