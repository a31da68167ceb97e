"""Predicted seconds of a step's forward, for the order in which steps are begun. Torch-free.

    compute     FLOPs / rate, and at least a few passes over the tokens in memory
    exchange    the dispatcher's price one way (dispatch/price.py), of a row chunk where there are several

The ratios matter, not the sums: a wrong cost gives a slower order, never another result. Costs follow from the
configuration alone, so that all ranks of a group order their exchanges the same way. Rates are round numbers: of GEMMs
and HBM on an H100 in bf16, and of one CPU core with gloo.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.anatomy.step_specs import StepSpec
from moefold.config.run import Config
from moefold.dispatch.catalog import CPU_LINKS, HOP_LATENCY, LinkSpeeds
from moefold.dispatch.price import predicted_one_way
from moefold.dispatch.room_sizes import tokens_per_rank
from moefold.kernels.facts import BYTES_PER_ELEMENT, training_precision

PASSES_OVER_TOKENS = 6  # of the stream, by norms, sums and permutations around a step's products


@dataclass(frozen=True)
class DeviceRates:
    """FLOP/s of products, bytes/s of memory, and links between ranks."""

    flops: float
    memory: float
    links: LinkSpeeds


DEVICE_RATES = {
    "cuda": DeviceRates(5e14, 2.5e12, LinkSpeeds()),
    "cpu": DeviceRates(5e10, 5e9, CPU_LINKS),
}


class StepCosts:
    def __init__(self, config: Config, device: str, node_size: int):
        rates = DEVICE_RATES.get(device, DEVICE_RATES["cuda"])
        precision = training_precision(device, config)
        bytes_each = BYTES_PER_ELEMENT[precision]
        tokens = tokens_per_rank(config)
        self.seq_len = config.data.seq_len
        self.seconds_per_flop = tokens / rates.flops  # per FLOP of one token
        stream_bytes = tokens * config.model.hidden * bytes_each
        self.least_compute = PASSES_OVER_TOKENS * stream_bytes / rates.memory
        self.one_way = HOP_LATENCY
        expert_ranks = config.parallel.ep * config.parallel.etp
        if expert_ranks > 1:
            _, self.one_way = predicted_one_way(config, node_size, bytes_each, rates.links)

    def seconds(self, spec: StepSpec) -> float:
        compute = spec.share * spec.flops(self.seq_len) * self.seconds_per_flop
        if spec.lane == "compute":
            return max(compute, spec.share * self.least_compute)
        travel = HOP_LATENCY
        if spec.exchanges:
            travel = spec.exchanges * self.one_way
        return compute + travel
