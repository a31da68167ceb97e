"""Assembly of a run: the only place where a configuration becomes objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moefold.anatomy.products import product_recipes
from moefold.anatomy.stage_contents import (
    embedding_ranks,
    final_norm_ranks,
    pipeline_stages,
    rank_of_each_stage,
)
from moefold.checkpoint.live.logical_tensors import StateProvider
from moefold.comm.consensus import raise_first_problem
from moefold.comm.host_objects import broadcast_object, union_of_sets
from moefold.config.errors import UserError
from moefold.config.keys import format_value, iterate_keys
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.data.corpus import Corpus, load_corpus
from moefold.data.loader import BatchLoader
from moefold.data.tokenizer import Tokenizer, choose_tokenizer, load_tokenizer
from moefold.dispatch.build import build_dispatcher, choose_dispatcher
from moefold.kernels.attention.autotune import known_or_measured_times
from moefold.kernels.attention.timings import known_times, remember_times
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts, facts_from_config, training_precision
from moefold.kernels.optimizer.add_squares import add_squares
from moefold.layout.axes import World
from moefold.layout.dtypes import DTYPES
from moefold.layout.rerun import inside_recompute
from moefold.memory.choose import attach_configured_policies
from moefold.model.attention.context_parallel import choose_context_mechanism
from moefold.model.initialise import initialise_parameters
from moefold.model.parts import ModelParts
from moefold.model.transformer import Transformer
from moefold.observe.trace import SpanRecorder
from moefold.optim.optimizer import Optimizer
from moefold.optim.parameter_groups import ParameterGroups
from moefold.pipeline.executor import Executor
from moefold.precision.operand_statistics import OperandStatistics
from moefold.precision.recipes import RecipeState, attach_recipes, weight_formats
from moefold.precision.scale_histories import ScaleHistories
from moefold.shard.buckets import Bucket, fill_buckets
from moefold.shard.clipping import ClippingPolicy, GlobalNormClipping
from moefold.shard.fp8_weights import Fp8Storage
from moefold.shard.gradients import Gradients
from moefold.shard.publish import Publisher
from moefold.shard.storage import storage_maker
from moefold.train.routing_replay import open_replay
from moefold.version import __version__


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
    clipping: ClippingPolicy
    parameters: Publisher
    all_finite: Tensor  # on the device: whether every loss and gradient so far was a number
    scale_histories: ScaleHistories
    operand_statistics: OperandStatistics
    further_state: dict[str, StateProvider]  # saved in checkpoints too
    dispatcher_reason: str
    step: int = 0
    before_update: Callable[[], None] = lambda: None  # waits for readers of the weights, such as a checkpoint
    phase: Callable[[str], AbstractContextManager[object]] = unobserved_phase  # around each phase of train_step


def assemble_run(
    config: Config,
    world: World,
    out: Path,
    corpus: Corpus | None = None,
    weights: Callable[[Transformer], None] | None = None,
) -> Run:
    """Build everything a run needs. `corpus` replaces the text that the configuration names; `weights` fills the model
    with given weights instead of random ones."""
    config = resolve_auto_values(config, world)
    config = resolve_tokenizer(config, corpus)
    config = check_config(config, world.size)
    require_agreement(config, world)
    config, dispatcher_reason = resolve_dispatcher(config, world)
    torch.manual_seed(config.train.seed)
    tokenizer = load_tokenizer(config.data.tokenizer, config.model.vocab, config.data.end_token)
    if corpus is None:
        corpus = load_corpus(config.data, tokenizer, config.model.vocab)
    loader, validation = make_loaders(config, corpus, world)
    kernels = choose_kernels(config, world)
    model = build_model(config, world, kernels, weights)
    loader.replay = open_replay(config, model, world)
    groups = ParameterGroups(config.optim, kernels)
    buckets = fill_run_buckets(config, model, world, groups, kernels)
    gradients = Gradients(buckets, world, config.optim.gradient_reduce, kernels[add_squares])
    spans = SpanRecorder(world.rank)
    return Run(
        config=config,
        world=world,
        out=out,
        tokenizer=tokenizer,
        loader=loader,
        validation=validation,
        model=model,
        gradients=gradients,
        executor=Executor(config, model, gradients, world, spans),
        optimizer=Optimizer(buckets, groups.rules),
        clipping=GlobalNormClipping(config.optim.max_norm),
        parameters=Publisher(model, buckets),
        all_finite=torch.ones((), dtype=torch.bool, device=world.device),
        scale_histories=ScaleHistories(model, world),
        operand_statistics=OperandStatistics(model, world, config.observe.fp8_every, inside_recompute),
        further_state={"precision": RecipeState(model)},
        dispatcher_reason=dispatcher_reason,
    )


def fill_run_buckets(
    config: Config, model: Transformer, world: World, groups: ParameterGroups, kernels: BoundKernels
) -> list[Bucket]:  # fmt: skip
    """The model's parameters in buckets that follow the optimizer's groups. A pattern may match on other pipeline ranks
    only."""
    if groups.entries:
        names = {name for name, _ in model.named_parameters()}
        groups.require_matches(union_of_sets(names, world.pp))
    return fill_buckets(
        model,
        world,
        held=pipeline_shared_weights(config),
        gradients=config.optim.gradients,
        group=groups.group_of,
        storage=storage_maker(config.optim.main),
        fp8=fp8_storage(config, model, kernels),
    )


def fp8_storage(config: Config, model: Transformer, kernels: BoundKernels) -> Fp8Storage | None:
    if config.precision.storage != "fp8":
        return None
    return Fp8Storage(weight_formats(model), kernels)


def require_agreement(config: Config, world: World) -> None:
    """Refuse ranks with different settings or different code, before the first step."""
    mine = {key.path: format_value(key.default) for key in iterate_keys(config)}
    mine["moefold version"] = __version__
    mine["torch version"] = torch.__version__
    mine["moefold source"] = source_digest()
    first = broadcast_object(mine, world.everyone)
    problems: list[str] = []
    for name, value in mine.items():
        if value != first[name]:
            text = f"{name} = {value} on rank {world.rank}, but {first[name]} on rank 0"
            problems.append(f"{text}; start all ranks alike")
    raise_first_problem(UserError(*problems) if problems else None, world)


@cache
def source_digest() -> str:
    """A digest of all source files of this package."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def resolve_auto_values(config: Config, world: World) -> Config:
    """The configuration with every `auto` replaced by the value for this machine."""
    device = world.device.type
    precision = training_precision(device, config)
    train = replace(config.train, device=device, precision=precision)
    return replace(config, train=train)


def resolve_dispatcher(config: Config, world: World) -> tuple[Config, str]:
    """The configuration with the dispatcher of the run in place of `auto`, and the reason. With all experts on each
    rank there is none to name."""
    name, reason = choose_dispatcher(config, world)
    if name == "local":
        return config, reason
    parallel = replace(config.parallel, dispatcher=name)
    return replace(config, parallel=parallel), reason


def resolve_tokenizer(config: Config, corpus: Corpus | None) -> Config:
    """The configuration with the tokenizer of its text. A given corpus has no text: auto means bytes, for samples."""
    tokenizer = choose_tokenizer(config.data, config.model.vocab)
    if corpus is not None and config.data.tokenizer == "auto":
        tokenizer = "byte"
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def make_loaders(config: Config, corpus: Corpus, world: World) -> tuple[BatchLoader, BatchLoader]:
    """The loaders of training and of validation. Validation has the same sequences in every run: its seed is 0."""
    data = config.data
    train = config.train
    starts, held_out_starts = None, None
    if data.attend == "document":
        starts = corpus.train_starts
        held_out_starts = corpus.held_out_starts
    where = (world.axis("dp"), world.device)
    loader = BatchLoader(corpus.train, data.seq_len, train.global_batch, train.seed, *where, starts)
    validation = BatchLoader(corpus.held_out, data.seq_len, train.validate_sequences, 0, *where, held_out_starts)
    return loader, validation


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
    config: Config, world: World, kernels: BoundKernels, start: Callable[[Transformer], None] | None = None
) -> Transformer:
    """This rank's part of the model on its device in its precision, initialised by name and seed, or filled by `start`,
    which gives every parameter its value."""
    choices = make_model_parts(config, world, kernels)
    here = world.axis("pp").index
    homes = rank_of_each_stage(config)
    stages = [stage for stage, home in zip(pipeline_stages(config), homes, strict=True) if home == here]
    with world.device, default_dtype(DTYPES[config.train.precision]):
        model = Transformer(config.model, choices, stages)
    recipe_of = {chosen.product.name: chosen.recipe for chosen in product_recipes(config)}
    attach_recipes(model, recipe_of, kernels, config.precision, held_elsewhere=recipe_of)
    attach_configured_policies(model, config)
    if start is not None:
        start(model)
    else:
        initialise_parameters(model, config.train.seed)
    return model


def make_model_parts(config: Config, world: World, kernels: BoundKernels) -> ModelParts:
    context = choose_context_mechanism(config.parallel.context, kernels, world)
    dispatcher = build_dispatcher(config, kernels, world)
    return ModelParts(world, kernels, dispatcher, context, config.data.seq_len)


def pipeline_shared_weights(config: Config) -> dict[str, tuple[int, ...]]:
    """Parameters of which several pipeline ranks hold copies."""
    ranks = {
        "embedding.weight": embedding_ranks(config),
        "head.norm.weight": final_norm_ranks(config),
    }
    return {name: tuple(holders) for name, holders in ranks.items() if len(holders) > 1}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
