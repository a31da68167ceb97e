"""Seconds of an optimizer's update on one rank.

An update moves every parameter's gradient, main weight, moments and weight once. Muon beside that writes and reads the
direction and its orthogonal matrix, and runs Newton-Schulz, whose rate was measured on an H200 (docs/optimizers.md).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from moefold.anatomy.adapters import adapter_parameters
from moefold.anatomy.model_totals import mtp_parameters, total_parameters
from moefold.anatomy.newton_schulz_flops import newton_schulz_flops
from moefold.anatomy.visiting_states import GIB
from moefold.config.run import Config, LoraConfig, ModelConfig
from moefold.plan.machine.cluster import Cluster
from moefold.plan.memory.grouped_parameters import trained_share
from moefold.plan.memory.resident import MAIN_WEIGHT_BYTES, OWN_WEIGHTS, STATE_ELEMENT_BYTES, fewest_moment_bytes
from moefold.plan.memory.run_setting import RunSetting

MUON_PASS_BYTES = 8  # of a parameter: direction and orthogonal matrix, each written and read in bf16
NEWTON_SCHULZ_RATE = 1.0  # of the peak in bf16, counting plain operations, of which the Gram form needs half
TWO_WAY_LINK = 0.91  # of the rate of one way, each way, as measured on an H200
Matrix = tuple[int, int]


class PassTimes(NamedTuple):
    """Seconds that a rank computes for a microbatch, beside which states may be copied."""

    forward: float
    backward: float


def update_seconds(s: RunSetting, cluster: Cluster, dense: float, expert: float, passes: PassTimes) -> float:
    """Seconds for parameters of the dense grid and of the expert grid whose state a rank holds."""
    trained = trained_part(s)
    dense *= trained
    expert *= trained
    owned = dense + expert
    moved = owned * optimizer_bytes(s)
    seconds = moved / cluster.pointwise_bandwidth
    if s.optim.rule == "muon":
        seconds += muon_seconds(s, cluster, dense, expert)
    if not s.states_on_host:
        return seconds
    copying = exposed_copy_seconds(s, cluster, owned, passes)
    return max(seconds, copying)


def exposed_copy_seconds(s: RunSetting, cluster: Cluster, owned: float, passes: PassTimes) -> float:
    """Seconds in which states come from the host and go back, both at once, beside nothing else. In this trainer copies
    go on during the whole step at best; those that do not fit in the window come behind backward, beside the next
    forward."""
    state = MAIN_WEIGHT_BYTES[s.optim.main] + fewest_moment_bytes(s.optim)
    one_way = owned * state
    rate = TWO_WAY_LINK * cluster.gpu.host_link
    if s.choices.stack != "moefold":
        return one_way / rate
    ahead = min(one_way, s.optim.states_window_gib * GIB)
    behind_backward = (one_way - ahead) / rate - passes.forward
    beyond_step = one_way / rate - s.microbatches * (passes.forward + passes.backward)
    return max(0.0, behind_backward, beyond_step)


def trained_part(s: RunSetting) -> float:
    """The share of a model's parameters that have gradients and state; where adapters are trained, their number over
    that of the frozen parameters."""
    lora = s.config.lora
    if lora.rank:
        return adapter_share(s.model, lora)
    return trained_share(s.model, s.optim.groups)


@lru_cache(maxsize=64)  # a search asks for it with every layout
def adapter_share(model: ModelConfig, lora: LoraConfig) -> float:
    config = Config(model=model, lora=lora)
    parameters = total_parameters(model) + mtp_parameters(model)
    return adapter_parameters(config) / parameters


def optimizer_bytes(s: RunSetting) -> float:
    """Bytes moved per parameter: gradient read, main weight and moments read and written, weight written, and read
    where there is no main weight."""
    optim = s.optim
    gradient = STATE_ELEMENT_BYTES[optim.gradients]
    main = MAIN_WEIGHT_BYTES[optim.main]
    moments = fewest_moment_bytes(optim)
    state = 2 * main + 2 * moments
    weight = s.recipe.wide
    if optim.main in OWN_WEIGHTS:
        weight *= 2
    return gradient + state + weight


def muon_seconds(s: RunSetting, cluster: Cluster, dense: float, expert: float) -> float:
    """What Muon adds. Dense matrices count as squares of the model's width, embedding and head as such matrices."""
    model = s.model
    square = model.hidden, model.hidden
    of_expert = model.moe.ffn, model.hidden
    flops = dense * orthogonalising_flops(square, s) + expert * orthogonalising_flops(of_expert, s)
    rate = NEWTON_SCHULZ_RATE * cluster.gpu.peak["bf16"]
    passes = (dense + expert) * MUON_PASS_BYTES
    return flops / rate + passes / cluster.pointwise_bandwidth


def orthogonalising_flops(matrix: Matrix, s: RunSetting) -> float:
    """Floating-point operations of Newton-Schulz for each element of such a matrix."""
    whole = newton_schulz_flops(*matrix, s.optim.muon.steps)
    return whole / prod(matrix)
