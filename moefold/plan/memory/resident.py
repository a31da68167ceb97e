"""Resident state of a rank: weights, gradients, main weights and moments, sharded over replicas as chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from moefold.anatomy.adapters import adapter_specs
from moefold.config.run import Config, LoraConfig, ModelConfig, OptimConfig, ParallelConfig
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.memory.base_bytes import saved_on_rank
from moefold.plan.memory.rank_stages import RankStages, StageCount
from moefold.plan.memory.replicas import replica_count, shard_count
from moefold.plan.memory.run_setting import RunSetting

BLOCK_SCALE = 4 / 128  # bytes: an fp32 scale for 128 elements
STATE_ELEMENT_BYTES = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2 + BLOCK_SCALE,
    "fp8": 1 + BLOCK_SCALE,
    "int8": 1 + BLOCK_SCALE,
}
SUM_BYTES = 4  # of a gradient that is summed over ranks, whatever it was sent as
# Of a main weight, beside the bf16 weight
MAIN_WEIGHT_BYTES = STATE_ELEMENT_BYTES | {"split": 2, "bf16": 0, "none": 0}
OWN_WEIGHTS = ("bf16", "none")  # main weights that are the model's own, where these are bf16
ADAMW_PIECES = ("E", "L")  # embedding and head, whatever the rule of matrices


@dataclass(frozen=True)
class ResidentState:
    """Resident state of a rank: number of parameters, its share of them among replicas, the part of that share whose
    gradients are reduced over ranks, and bytes. `copies` of weights in low precision are a part of `weights`."""

    parameters: float
    share: float
    reduced: float
    weights: float
    copies: float
    gradients: float
    main: float
    moments: float
    trained: float = 1.0  # share of the parameters that have gradients


def resident_state(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> ResidentState:
    """Resident state of a rank, whole or sharded over replicas. With a low precision, weights include the quantised
    copies that GEMMs read."""
    recipe = s.recipe
    optim = s.optim
    parameters = 0.0
    share = 0.0
    reduced = 0.0
    by_kind = rank_parameters(s, rank, stages)
    for kind, count in by_kind.items():
        shards = shard_count(s, kind)
        parameters += count
        share += count / shards
        if replica_count(s, kind) > 1:
            reduced += count / shards

    # Parameters whose weights, and whose optimizer state, are on this rank.
    sharding = s.choices.sharding
    weight_count = share if sharding == "fsdp" else parameters
    state_count = parameters if sharding == "none" else share
    held = weight_count / parameters
    quantized = sum(stage.quantized for stage in stages) * held
    copies = sum(stage.copies for stage in stages) * held
    plain = weight_count
    if s.keeps_only_quantised:
        plain -= quantized
    state = ResidentState(
        parameters=parameters,
        share=share,
        reduced=reduced,
        weights=plain * recipe.wide + copies,
        copies=copies,
        gradients=weight_count * STATE_ELEMENT_BYTES[optim.gradients],
        main=main_weight_bytes(s, state_count, quantized * state_count / weight_count),
        moments=moment_bytes(s, rank, state_count),
    )
    if s.config.lora.rank:
        return with_adapters(s, rank, state)
    if s.config.train.objective == "dpo":  # a frozen copy of the weights, to compare with
        return replace(state, weights=2 * state.weights)
    return state


def with_adapters(s: RunSetting, rank: RankStages, base: ResidentState) -> ResidentState:
    """The state of a rank that trains adapters beside the frozen weights of `base`. Adapters are counted as if spread
    evenly over pipeline ranks, and shared out among replicas as the base would be."""
    adapters = adapter_count(s)
    saved = saved_on_rank(s, rank)
    trained = adapters / base.parameters
    held = base.share * trained if s.choices.sharding == "fsdp" else adapters
    return replace(
        base,
        parameters=base.parameters + adapters,
        share=base.share * trained,
        reduced=base.reduced * trained,
        weights=base.weights - saved + held * s.recipe.wide,
        gradients=base.gradients * trained,
        main=base.main * trained,
        moments=base.moments * trained,
        trained=trained,
    )


def adapter_count(s: RunSetting) -> float:
    """Parameters of the adapters of a pipeline rank."""
    layers = s.model.layers + s.model.mtp
    return adapters_of_layer(s) * layers / s.parallel.pp


def adapters_of_layer(s: RunSetting) -> float:
    """Parameters of a layer's adapters, as if spread evenly over layers."""
    p = s.parallel
    cut = ParallelConfig(tp=p.tp, ep=p.ep, etp=p.etp)
    return sum_adapters(s.model, s.config.lora, cut) / (s.model.layers + s.model.mtp)


@lru_cache(maxsize=256)  # a search asks for them with every layout
def sum_adapters(model: ModelConfig, lora: LoraConfig, parallel: ParallelConfig) -> int:
    """Of a rank that has all layers."""
    config = Config(model=model, lora=lora, parallel=parallel)
    return sum(spec.parameters for spec in adapter_specs(config))


def main_weight_bytes(s: RunSetting, count: float, quantized: float) -> float:
    """Bytes of the main weights of so many parameters, some of them quantised. Weights that are stored in FP8 alone
    have whole main weights, in fp32 where no other type is named; of the rest, fp32 weights are their own."""
    stored = quantized if s.stores_fp8 else 0.0
    has_main = s.recipe.wide < 4
    beside = MAIN_WEIGHT_BYTES[s.optim.main] if has_main else 0
    of_stored = stored * STATE_ELEMENT_BYTES.get(s.optim.main, 4)
    return (count - stored) * beside + of_stored


def moment_sizes(optim: OptimConfig) -> tuple[float, float]:
    """Bytes of an element of the first and of the second moment."""
    second = optim.moments if optim.second_moment == "as_first" else optim.second_moment
    return STATE_ELEMENT_BYTES[optim.moments], STATE_ELEMENT_BYTES[second]


def fewest_moment_bytes(optim: OptimConfig) -> float:
    """Bytes of a parameter's moments: of Muon's momentum, or of the two of any other rule."""
    first, second = moment_sizes(optim)
    return first if optim.rule == "muon" else first + second


def moment_bytes(s: RunSetting, rank: RankStages, state_count: float) -> float:
    """Bytes of the optimizer's moments on a rank. Under Muon a parameter has one, its momentum; embedding and head are
    left to AdamW and have two. Norms and biases are not counted apart."""
    first, second = moment_sizes(s.optim)
    if s.optim.rule != "muon":
        return state_count * (first + second)
    of_adamw: Counter[ParameterClass] = Counter()
    for pieces in rank.pieces:
        for piece, layer in pieces:
            if piece in ADAMW_PIECES:
                of_adamw.update(s.count_piece(piece, layer).parameters)
    if rank.copies_embedding:
        of_adamw.update(s.count_piece("E", 0).parameters)
    is_sharded = s.choices.sharding != "none"
    second_moments = 0
    for kind, count in of_adamw.items():
        shards = shard_count(s, kind) if is_sharded else 1
        second_moments += count / shards
    return state_count * first + second_moments * second


def rank_parameters(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> Counter[ParameterClass]:
    parameters: Counter[ParameterClass] = Counter()
    for stage in stages:
        parameters.update(dict(stage.parameters))
    if rank.copies_embedding:
        embedding = s.count_piece("E", 0)
        parameters.update(embedding.parameters)
    return parameters
