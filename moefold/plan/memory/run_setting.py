"""The setting of a plan: a run on a number of ranks under a plan's choices, with degrees, microbatches and loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, sqrt
from statistics import NormalDist

from moefold.anatomy.stage_contents import pair_kind
from moefold.anatomy.step_specs import sliding_window_of
from moefold.config.errors import UserError
from moefold.config.memory_regions import entries_of_expert_weights, entries_of_regions
from moefold.config.run import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from moefold.dispatch.price import cheapest_dispatcher
from moefold.layout.fold import powers_of_two_in
from moefold.plan.layer.layer_costs import PieceCount, count_piece, is_last_layer
from moefold.plan.layer.layer_recipes import quantises_products, recipes_of_layers
from moefold.plan.layer.rank_shapes import RankPortion, RankShapes, make_rank_portion
from moefold.plan.length_histogram import BatchShape, attention_imbalance
from moefold.plan.memory.live_microbatches import RankMoments, moments_by_rank
from moefold.plan.memory.rank_stages import StageCount, StagePieces, count_stage
from moefold.plan.options import PlanChoices, PrecisionRecipe

GIB = 2**30
CUDA_CONTEXT_BYTES = 0.6 * GIB  # CUDA context and loaded kernels
NCCL_GROUP_BYTES = 0.15 * GIB  # NCCL buffers of each axis with collectives


@dataclass(frozen=True)
class RunSetting:
    """A run on `world` ranks with a plan's choices, and the quantities derived from them."""

    config: Config
    world: int
    choices: PlanChoices
    portion: RankPortion
    moments: list[RankMoments]
    microbatches: int

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def data(self) -> DataConfig:
        return self.config.data

    @property
    def train(self) -> TrainConfig:
        return self.config.train

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def pipeline(self) -> PipelineConfig:
        return self.config.pipeline

    @property
    def optim(self) -> OptimConfig:
        return self.config.optim

    @property
    def recipe(self) -> PrecisionRecipe:
        return self.choices.recipe

    @property
    def product_precision(self) -> str:
        return product_precision(self.config, self.choices)

    @property
    def stores_fp8(self) -> bool:
        """Whether weights that products of the trainer read in FP8 have no copy in another dtype."""
        return self.config.precision.storage == "fp8"

    @property
    def keeps_only_quantised(self) -> bool:
        """Whether quantised weights have no wide copy, in a recipe of the trainer or in a low precision."""
        return self.stores_fp8 or self.choices.quantized_weights

    def count_piece(self, piece: str, layer: int) -> PieceCount:
        return count_piece(self.model, piece, layer, self.portion, self.choices)

    def count_stage(self, pieces: StagePieces, load: float = 1.0) -> StageCount:
        return count_stage(self.model, pieces, self.portion, self.choices, load)

    def layer_shapes(self, layer: int) -> RankShapes:
        model = self.model
        portion = self.portion
        window = sliding_window_of(model, layer)
        recipes = recipes_of_layers(model, portion.precision)
        is_last = is_last_layer(model, layer)
        choices = self.choices.in_layer(layer, is_last)
        return RankShapes(model, portion, choices, window, products=recipes[layer])

    @cached_property
    def degrees(self) -> dict[str, int]:
        p = self.parallel
        dense_ranks = p.tp * p.cp * p.pp
        expert_ranks = p.etp * p.ep * p.pp
        degrees = dict(self.portion.degrees)
        degrees["dp"] = max(1, self.world // dense_ranks)
        degrees["edp"] = max(1, self.world // expert_ranks)
        return degrees

    @cached_property
    def attention_imbalance(self) -> float:
        """Attention of the busiest rank over the mean, where documents differ in length."""
        p = self.parallel
        sharing_experts = p.ep * p.etp // (p.tp * p.cp)
        shape = BatchShape(self.degrees["dp"], sharing_experts, self.microbatches, self.train.micro_batch)
        return attention_imbalance(self.choices.documents, self.data.seq_len, shape)

    def replicas_of(self, grid: str) -> int:
        """Number of ranks that would hold the same parameters of a grid if they were not shared out."""
        if grid == "dense":
            return self.degrees["dp"] * self.parallel.cp
        return self.degrees["edp"]

    def shards_of(self, grid: str) -> int:
        """Number of ranks among which the parameters of a grid are shared out, in one copy of all shares."""
        replicas = self.replicas_of(grid)
        return replicas // gcd(replicas, self.config.shard.replicas)

    @property
    def grows_gradients(self) -> bool:
        """Whether gradients are allocated one by one while activations are freed: moefold allocates a gradient when
        backward reaches its parameter, and keeps it for later microbatches. Fully sharded gradients do not grow: those
        of a unit are reduced when backward has left it. With static graphs they have their memory from the start."""
        stages = self.parallel.pp * self.pipeline.vpp
        choices = self.choices
        fleeting = choices.sharding != "fsdp" and choices.graphs != "static"
        keeps_gradients = choices.stack == "moefold" and fleeting
        return keeps_gradients and self.microbatches == 1 and stages == 1

    @property
    def states_on_host(self) -> bool:
        """Whether moments and main weights are in host memory."""
        return self.choices.states_on_host or self.optim.states == "host"

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are freed while backward runs: units are updated inside it."""
        return self.optim.when == "backward" and self.grows_gradients

    @cached_property
    def outside(self) -> float:
        """Bytes of GPU memory outside torch's allocator."""
        sizes = [*self.degrees.values(), self.parallel.pp]
        if self.parallel.context_sizes == "dynamic":
            sizes += powers_of_two_in(self.degrees["dp"] * self.parallel.cp)
        groups = sum(size > 1 for size in sizes)
        return CUDA_CONTEXT_BYTES + NCCL_GROUP_BYTES * groups

    @cached_property
    def load(self) -> float:
        """Rows of a rank's experts at the quantile, over their even share. The variance is that of experts (`spread`),
        averaged over the experts of the rank, plus that of sampling. A rank that holds all experts has neither."""
        portion = self.portion
        choices = self.choices
        moe = self.model.moe
        if portion.ep == 1 or choices.spread == 0:
            return 1.0
        # Variance of a rank's rows, relative to their mean.
        expert_variance = choices.spread**2 * portion.ep / moe.experts
        sampling_variance = 1 / max(1.0, portion.tokens * moe.top_k)
        variance = expert_variance + sampling_variance
        others = 1 - 1 / portion.ep
        deviation = sqrt(others * variance)
        load = 1 + normal_deviations(choices.quantile) * deviation
        return round(max(1.0, load), 4)


def product_precision(config: Config, choices: PlanChoices) -> str:
    """The precision whose peak is that of the products: FP8 with a recipe of the trainer."""
    return "fp8" if quantises_products(config.precision) else choices.precision


@lru_cache(maxsize=64)
def normal_deviations(quantile: float) -> float:
    """Distance of this quantile of a normal distribution from the mean, in standard deviations."""
    return NormalDist().inv_cdf(quantile)


def microbatches_per_step(config: Config, world: int) -> int:
    """Microbatches of one pipeline in a step."""
    p = config.parallel
    train = config.train
    ranks_of_replica = p.tp * p.cp * p.pp
    dp = max(1, world // ranks_of_replica)
    sequences = dp * train.micro_batch
    return max(1, train.global_batch // sequences)


def defers_weight_gradients(config: Config, choices: PlanChoices, separate_wgrad: bool) -> bool:
    """Whether weight gradients are computed after the data gradients of a stage: in slots of their own, or in the gaps
    of a paired slot of this trainer."""
    pipeline = config.pipeline
    fills_gaps = pipeline.pair and pipeline.fill and choices.stack == "moefold"
    return fills_gaps or separate_wgrad


def check_product_recipes(config: Config, choices: PlanChoices) -> None:
    """Refuse recipes of this trainer together with a low precision or the layers of another trainer."""
    if not quantises_products(config.precision):
        return
    recipe = f"precision.recipe = {config.precision.recipe}"
    if choices.recipe.quantizes:
        problem = f"{recipe} and precision {choices.precision} are two number formats of the same products"
        raise UserError(f"{problem}; leave one out, or set --precision bf16")
    if choices.stack != "moefold":
        raise UserError(f"{recipe} is a recipe of moefold's layers, not of stack {choices.stack}; set --stack moefold")


def agree_on_regions(config: Config, choices: PlanChoices) -> tuple[Config, PlanChoices]:
    """Both with the regions of the choices, or where these name none with those of the configuration. Expert weights
    are no region, and the configuration's alone."""
    memory = config.memory
    configured = entries_of_regions(memory.offload)
    recompute = choices.recompute or memory.recompute
    offload = choices.offload or configured
    if (choices.recompute, choices.offload) == (memory.recompute, configured):
        return config, choices
    memory = replace(memory, recompute=recompute, offload=(*entries_of_expert_weights(memory.offload), *offload))
    agreed = replace(choices, recompute=recompute, offload=offload)
    return replace(config, memory=memory), agreed


def agree_on_sharding(config: Config, choices: PlanChoices) -> PlanChoices:
    """The choices of a run: `shard.mode zero3` is the sharding fsdp."""
    if config.shard.mode == "zero3":
        return replace(choices, sharding="fsdp")
    return choices


def build_run_setting(config: Config, world: int, choices: PlanChoices) -> RunSetting:
    config, choices = agree_on_regions(config, choices)
    choices = agree_on_sharding(config, choices)
    check_product_recipes(config, choices)
    pipeline = config.pipeline
    pp = config.parallel.pp
    microbatches = microbatches_per_step(config, world)
    schedule = pipeline.schedule
    moments = moments_by_rank(schedule, pp, pipeline.vpp, microbatches, pair_kind(pipeline), pipeline.defer)
    element = int(choices.recipe.wide)
    dispatcher, _ = cheapest_dispatcher(config, choices.node, element)
    separate_wgrad = any(rank.separate_wgrad for rank in moments)
    defers_wgrad = defers_weight_gradients(config, choices, separate_wgrad)
    portion = make_rank_portion(config, dispatcher, defers_wgrad, accumulates=microbatches > 1)
    return RunSetting(config, world, choices, portion, moments, microbatches)
