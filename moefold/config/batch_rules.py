"""Rules of `data.batch_of samples`: steps whose number of microbatches depends on their samples."""

from __future__ import annotations

from moefold.config.rule import ConfigOnRanks, RuleList

BATCH_OF = "data.batch_of"

BATCH_RULES = RuleList()


def counts_samples(c: ConfigOnRanks) -> bool:
    return c.data.batch_of == "samples"


@BATCH_RULES.rule(
    "counted samples are packed",
    (BATCH_OF, "data.packing"),
    why="windows have no samples to count",
    fix="set data.batch_of to sequences",
)
def counted_samples_are_packed(c: ConfigOnRanks) -> bool:
    return not counts_samples(c) or c.data.packing != "windows"


@BATCH_RULES.rule(
    "a bin of counted samples is a microbatch",
    (BATCH_OF, "train.micro_batch"),
    why="a microbatch is one bin of at most data.seq_len tokens",
    fix="set train.micro_batch to 1",
)
def bin_is_a_microbatch(c: ConfigOnRanks) -> bool:
    return not counts_samples(c) or c.train.micro_batch == 1


@BATCH_RULES.rule(
    "steps of other lengths are launched anew",
    (BATCH_OF, "memory.graphs"),
    why="a captured step has the same number of microbatches every time",
    fix="set memory.graphs to none",
)
def steps_are_launched_anew(c: ConfigOnRanks) -> bool:
    return not counts_samples(c) or c.memory.graphs == "none"


@BATCH_RULES.rule(
    "recorded sequences are counted",
    (BATCH_OF, "train.record_routing", "train.replay_routing"),
    why="a record of routing has a place for every sequence of every step",
    fix="set data.batch_of to sequences",
)
def recorded_sequences_are_counted(c: ConfigOnRanks) -> bool:
    has_record = c.train.record_routing or c.train.replay_routing
    return not counts_samples(c) or not has_record
