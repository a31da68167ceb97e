"""Seconds, FLOPs and sent bytes of samples by length and size of their context-parallel group, by the planner's clock.

Tokens cost the same in any group: a line through two lengths of a rank. Attention is timed for every length, and
samples that a rank could hold are taken to be divided evenly over a group and attended to at the speed of whole
samples, which is the best that packed sequences can do. Keys and values of all tokens of a group go round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from moefold.config.run import Config
from moefold.data.dynamic_context import ContextMicrobatch, SampleSeconds
from moefold.plan.layer.layer_costs import StepCount
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.rank_stages import StagePieces, stages_by_rank
from moefold.plan.memory.run_setting import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.time.step_times import PassSeconds, StepClock, sum_pass_seconds

MIDDLE_LENGTHS = 4  # timed between a length and twice of it; others lie on lines between them
SHORTEST = 64
BACKWARD_FLOPS = 2  # over those of the forward
BACKWARD_ATTENTION_FLOPS = 2.5  # likewise


class RankWork(NamedTuple):
    """FLOPs of a rank, and the bytes that it sends over its context-parallel groups."""

    flops: float = 0.0
    sent: float = 0.0


class PlannedContextPrice:
    """Prices on `world` ranks of a GPU, of which each holds `limit` tokens of a microbatch."""

    def __init__(self, config: Config, choices: PlanChoices, gpu: Gpu, world: int, limit: int):
        self.config = config
        self.choices = choices
        self.gpu = gpu
        self.world = world
        self.limit = limit
        half = limit // 2
        whole_seconds = self.token_seconds(limit)
        half_seconds = self.token_seconds(half)
        self.each_token = (whole_seconds - half_seconds) / (limit - half)
        self.fixed = max(0.0, whole_seconds - limit * self.each_token)
        self.timed_attention = cache(self.attention_of)
        self.priced = cache(self.price_of)
        self.sent_of_size = cache(self.sending_of)
        self.counted_flops = cache(self.flops_of)
        self.counted_steps = list(self.all_steps(self.clock(limit, 1)))
        products = sum(step.flops - step.attention for step in self.counted_steps)
        self.product_flops = products / limit

    def of_sample(self, length: int, size: int) -> SampleSeconds:
        return self.priced(length, size)

    def price_of(self, length: int, size: int) -> SampleSeconds:
        tokens = length * self.each_token / size
        attention = self.attention_seconds(length, size)
        sending = length * self.sent_of_size(size).seconds
        return SampleSeconds(tokens, attention, sending)

    def clock(self, length: int, size: int) -> StepClock:
        """The clock of a microbatch of one sequence, in a step of several."""
        config = self.config
        parallel = replace(config.parallel, cp=size)
        data = replace(config.data, seq_len=length)
        sequences = 2 * self.world // (size * parallel.tp * parallel.pp)
        train = replace(config.train, micro_batch=1, global_batch=max(1, sequences))
        changed = replace(config, parallel=parallel, data=data, train=train)
        setting = build_run_setting(changed, self.world, self.choices)
        return StepClock(setting, self.gpu)

    def pieces(self) -> Iterator[StagePieces]:
        for rank in stages_by_rank(self.config):
            yield from rank.pieces

    def token_seconds(self, length: int) -> float:
        """Seconds of a rank's tokens but for attention, over all stages."""
        clock = self.clock(length, 1)
        stages = [clock.time_stage(pieces) for pieces in self.pieces()]
        passes = sum_pass_seconds(stages)
        every = sum(op.total for op in passes)
        return every - attention_of_passes(passes)

    def attention_seconds(self, length: int, size: int) -> float:
        """Seconds of a sample's attention on each rank of a group, on a line between two timed lengths."""
        below, above = timed_lengths(length)
        if below == above:
            return self.timed_attention(below, size)
        share = (length - below) / (above - below)
        shorter = self.timed_attention(below, size)
        longer = self.timed_attention(above, size)
        return shorter + share * (longer - shorter)

    def attention_of(self, length: int, size: int) -> float:
        if length <= self.limit and size > 1:
            return self.timed_attention(length, 1) / size
        clock = self.clock(length, size)
        passes: list[PassSeconds] = []
        for pieces in self.pieces():
            for (piece, layer), times in Counter(pieces).items():
                steps = clock.time_steps(piece, layer)
                passes += times * [steps.get("attend", PassSeconds())]
        return attention_of_passes(sum_pass_seconds(passes))

    def sending_of(self, size: int) -> SentTokens:
        """Seconds and bytes of each token of a full group."""
        if size == 1:
            return SentTokens(0.0, 0.0)
        length = size * self.limit
        clock = self.clock(length, size)
        seconds = 0.0
        sent = 0.0
        for step in self.attend_steps(clock):
            for traffic in step.sent:
                if traffic.axis.startswith("cp"):
                    for each in (traffic.forward, traffic.backward):
                        seconds += clock.context_seconds(traffic.axis, each)
                        sent += each
        return SentTokens(seconds / length, sent / length)

    def flops_of(self, length: int) -> float:
        """Of a whole sample, forward and backward."""
        attention = 0.0
        for step in self.counted_steps:
            attention += 2 * step.spec.context * step.spec.seen(length)
        products = self.product_flops * (1 + BACKWARD_FLOPS)
        return length * (products + attention * (1 + BACKWARD_ATTENTION_FLOPS))

    def all_steps(self, clock: StepClock) -> Iterator[StepCount]:
        for pieces in self.pieces():
            for piece, layer in pieces:
                yield from clock.setting.count_piece(piece, layer).steps

    def attend_steps(self, clock: StepClock) -> Iterator[StepCount]:
        for step in self.all_steps(clock):
            if step.name == "attend":
                yield step

    def work_of_ranks(
        self, microbatches: Iterable[ContextMicrobatch], lengths: list[int], ranks: int
    ) -> list[RankWork]:
        """What each rank computes and sends in a step."""
        work = [RankWork()] * ranks
        for microbatch in microbatches:
            for first, size, samples in microbatch.groups:
                flops = sum(self.counted_flops(lengths[sample]) for sample in samples)
                tokens = sum(lengths[sample] for sample in samples)
                sent = tokens * self.sent_of_size(size).bytes
                for rank in range(first, first + size):
                    so_far = work[rank]
                    work[rank] = RankWork(so_far.flops + flops / size, so_far.sent + sent)
        return work


class SentTokens(NamedTuple):
    """Of each rank, for each token of its group."""

    seconds: float
    bytes: float


def attention_of_passes(passes: PassSeconds) -> float:
    return sum(op.attention for op in passes)


def timed_lengths(length: int) -> tuple[int, int]:
    """The timed lengths around a length."""
    below = SHORTEST
    while 2 * below <= length:
        below *= 2
    if length <= below:
        return below, below
    step = below // MIDDLE_LENGTHS
    passed = (length - below) // step
    near = below + passed * step
    return near, near + step
