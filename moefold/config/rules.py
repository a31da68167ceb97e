"""Every rule that ties keys together, as data: the checks, the messages and the planner's pruning read one list.

A rule is (name, reads, holds, says, fix). `reads` names its keys, so that a rule is passed over when one of them
is already known to be illegal and arithmetic on it would only add noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import attrgetter

from moefold.config.errors import UserError, printable_text
from moefold.config.model_rules import MODEL_RULES
from moefold.config.optimizer_groups import group_problems
from moefold.config.rule import ConfigOnRanks, ConfigRule, divisors_in_words, simple_rule
from moefold.config.run import Config, ParallelConfig
from moefold.schedule import stage_layout
from moefold.schedule.schedule_catalog import SCHEDULES
from moefold.schedule.schedule_error import ScheduleError

CROSS_FIELD_RULES: list[ConfigRule] = [
    ConfigRule(
        "what is kept is written",
        ("checkpoint.keep_every", "checkpoint.every"),
        lambda c: c.config.checkpoint.keep_every % c.config.checkpoint.every == 0,
        lambda c: (
            f"checkpoint.keep_every = {c.config.checkpoint.keep_every} is no multiple of checkpoint.every = "
            f"{c.config.checkpoint.every}: steps to keep would not be written"
        ),
        lambda c: f"set checkpoint.keep_every to one of 0, {c.config.checkpoint.every}",
    ),
    ConfigRule(
        "the checkpoint path names a place",
        ("checkpoint.path",),
        lambda c: re.fullmatch(r"([A-Za-z][\w+.:-]*://)?[^\x00-\x1f:]*", c.config.checkpoint.path) is not None,
        lambda c: (
            f"checkpoint.path = {printable_text(c.config.checkpoint.path)} names no place; "
            "expected a folder, or a path such as s3://bucket/run"
        ),
        lambda c: 'set checkpoint.path to ""',
    ),
    ConfigRule(
        "the name can be a folder's",
        ("name",),
        lambda c: re.fullmatch(r"\w[\w.+-]{0,80}", c.config.name, re.ASCII) is not None,
        lambda c: f"name = {printable_text(c.config.name)} cannot name a folder; expected letters, digits and . _ + -",
        lambda c: "set name to something like my-run",
    ),
    ConfigRule(
        "kv heads divide heads",
        ("model.attention.heads", "model.attention.kv_heads"),
        lambda c: c.config.model.attention.heads % c.config.model.attention.kv_heads == 0,
        lambda c: (
            f"model.attention.kv_heads = {c.config.model.attention.kv_heads} does not divide "
            f"model.attention.heads = {c.config.model.attention.heads}"
        ),
        lambda c: f"set model.attention.kv_heads to one of {divisors_in_words(c.config.model.attention.heads)}",
    ),
    ConfigRule(
        "head width is even",
        ("model.attention.head_dim",),
        lambda c: c.config.model.attention.head_dim % 2 == 0,
        lambda c: f"model.attention.head_dim = {c.config.model.attention.head_dim} is odd; RoPE turns pairs",
        lambda c: f"set model.attention.head_dim to {c.config.model.attention.head_dim + 1}",
    ),
    ConfigRule(
        "top-k within experts",
        ("model.moe.top_k", "model.moe.experts"),
        lambda c: c.config.model.moe.top_k <= c.config.model.moe.experts,
        lambda c: (
            f"model.moe.top_k = {c.config.model.moe.top_k} exceeds model.moe.experts = {c.config.model.moe.experts}"
        ),
        lambda c: f"set model.moe.top_k to at most {c.config.model.moe.experts}",
    ),
    ConfigRule(
        "dense layers within layers",
        ("model.moe.dense_layers", "model.layers"),
        lambda c: c.config.model.moe.dense_layers <= c.config.model.layers,
        lambda c: (
            f"model.moe.dense_layers = {c.config.model.moe.dense_layers} exceeds model.layers = {c.config.model.layers}"
        ),
        lambda c: f"set model.moe.dense_layers to at most {c.config.model.layers}",
    ),
    ConfigRule(
        "llama3 frequencies in order",
        ("model.attention.rope.low_frequency", "model.attention.rope.high_frequency", "model.attention.rope.scaling"),
        lambda c: (
            c.config.model.attention.rope.scaling != "llama3"
            or c.config.model.attention.rope.low_frequency < c.config.model.attention.rope.high_frequency
        ),
        lambda c: (
            f"model.attention.rope.low_frequency = {c.config.model.attention.rope.low_frequency:g} is not below "
            f"model.attention.rope.high_frequency = {c.config.model.attention.rope.high_frequency:g}"
        ),
        lambda c: f"set model.attention.rope.high_frequency above {c.config.model.attention.rope.low_frequency:g}",
    ),
    ConfigRule(
        "yarn turns in order",
        ("model.attention.rope.beta_fast", "model.attention.rope.beta_slow", "model.attention.rope.scaling"),
        lambda c: (
            c.config.model.attention.rope.scaling != "yarn"
            or c.config.model.attention.rope.beta_slow <= c.config.model.attention.rope.beta_fast
        ),
        lambda c: (
            f"model.attention.rope.beta_slow = {c.config.model.attention.rope.beta_slow:g} is above "
            f"model.attention.rope.beta_fast = {c.config.model.attention.rope.beta_fast:g}"
        ),
        lambda c: f"set model.attention.rope.beta_fast to at least {c.config.model.attention.rope.beta_slow:g}",
    ),
    ConfigRule(
        "files are named",
        ("data.source", "data.files"),
        lambda c: (c.config.data.source == "files") == bool(c.config.data.files),
        lambda c: (
            "data.source = files, but data.files is empty"
            if c.config.data.source == "files"
            else f"data.files = {printable_text(','.join(c.config.data.files))}, but data.source = {c.config.data.source}"
        ),
        lambda c: "set data.files to your files, such as --data.source files --data.files corpus.txt",
    ),
    simple_rule(
        "there are documents to attend within",
        ("data.attend", "data.source"),
        lambda c: c.data.attend == "sequence" or c.data.source != "zipf",
        "random tokens are one document without end",
        "set data.attend to sequence",
    ),
    simple_rule(
        "documents are met whole",
        ("data.attend", "parallel.cp", "parallel.context"),
        lambda c: (
            c.data.attend == "sequence" or c.parallel.cp == 1 or c.parallel.context not in ("ring", "hierarchical")
        ),
        "a block of keys that goes round a ring does not know where documents begin",
        "set parallel.context to all_gather",
    ),
    ConfigRule(
        "bytes fit the vocabulary",
        ("data.tokenizer", "model.vocab"),
        lambda c: c.config.data.tokenizer != "byte" or c.config.model.vocab >= 256,
        lambda c: f"model.vocab = {c.config.model.vocab} cannot hold the 256 tokens of data.tokenizer = byte",
        lambda c: "set model.vocab to 256 or more",
    ),
    ConfigRule(
        "dense grid fits the world",
        ("parallel.tp", "parallel.cp", "parallel.pp"),
        lambda c: c.world % c.dense_model_ranks == 0,
        lambda c: f"parallel.tp x cp x pp = {c.dense_model_ranks} does not divide the number of ranks, {c.world}",
        lambda c: (
            f"start a multiple of {c.dense_model_ranks} ranks, or choose a product among {divisors_in_words(c.world)}"
        ),
    ),
    ConfigRule(
        "expert grid fits the world",
        ("parallel.ep", "parallel.etp", "parallel.pp"),
        lambda c: c.world % c.expert_model_ranks == 0,
        lambda c: f"parallel.etp x ep x pp = {c.expert_model_ranks} does not divide the number of ranks, {c.world}",
        lambda c: (
            f"start a multiple of {c.expert_model_ranks} ranks, or choose a product among {divisors_in_words(c.world)}"
        ),
    ),
    ConfigRule(
        "global batch splits evenly",
        ("train.global_batch", "train.micro_batch", "parallel.tp", "parallel.cp", "parallel.pp"),
        lambda c: c.config.train.global_batch % (c.dp * min(c.config.train.micro_batch, c.share)) == 0,
        lambda c: (
            f"train.global_batch = {c.config.train.global_batch} does not split over {c.dp} data-parallel ranks "
            f"in parts of train.micro_batch = {c.config.train.micro_batch}"
        ),
        lambda c: (
            f"set train.micro_batch to one of {divisors_in_words(c.config.train.global_batch // c.dp)}"
            if c.config.train.global_batch % c.dp == 0
            else f"set train.global_batch to a multiple of {c.dp * c.config.train.micro_batch}"
        ),
    ),
]


def divisibility_rule(
    degree: str, key: str, what: str, when: Callable[[ConfigOnRanks], bool] = lambda c: True, times: int = 1
) -> ConfigRule:
    """`parallel.DEGREE` (times a factor) must divide the whole number at `key`."""

    def size_at_key(c: ConfigOnRanks) -> int:
        return attrgetter(key)(c.config)

    def number_of_parts(c: ConfigOnRanks) -> int:
        return getattr(c.config.parallel, degree) * times

    factor = f"{times} x " if times > 1 else ""
    return ConfigRule(
        f"{degree} splits {key}",
        (f"parallel.{degree}", key),
        lambda c: number_of_parts(c) <= times or not when(c) or size_at_key(c) % number_of_parts(c) == 0,
        lambda c: f"{factor}parallel.{degree} = {number_of_parts(c)} does not divide {key} = {size_at_key(c)}, {what}",
        lambda c: (
            f"set parallel.{degree} to one of {divisors_in_words(size_at_key(c) // times)}"
            if size_at_key(c) % times == 0
            else f"set {key} to a multiple of {number_of_parts(c)}"
        ),
    )


def sequence_multiple(p: ParallelConfig) -> int:
    """What a sequence's length must be a multiple of: two chunks for each cp rank, cut over the tp ranks."""
    return p.tp * p.cp * (2 if p.cp > 1 else 1)


def ranks_sharing_heads(c: ConfigOnRanks) -> int:
    """Over how many ranks the heads of one rank are spread by all-to-all context parallelism."""
    return c.config.parallel.tp * c.config.parallel.cp


def has_dense_layers(c: ConfigOnRanks) -> bool:
    return c.config.model.moe.dense_layers > 0 or c.config.model.moe.every > 1


def pipeline_stage_count(config: Config) -> int:
    return config.parallel.pp * config.pipeline.vpp


def pipeline_piece_count(config: Config) -> int:
    return config.model.layers + config.model.mtp + 2


def layout_problems(config: Config) -> list[str]:
    """What is wrong with the layout string; nothing where there is none."""
    m = config.model
    if not config.pipeline.layout:
        return []
    try:
        return stage_layout.stage_layout_problems(
            stage_layout.parse_layout(config.pipeline.layout),
            pipeline_stage_count(config),
            m.layers,
            m.moe.dense_layers,
            m.mtp,
        )
    except ScheduleError as unsound:
        return list(unsound.problems)


DIVISIBILITY_RULES = [
    divisibility_rule("tp", "model.attention.heads", "whose heads it spreads"),
    divisibility_rule("tp", "model.attention.kv_heads", "whose heads it spreads"),
    divisibility_rule("tp", "model.vocab", "whose words it spreads"),
    divisibility_rule("tp", "model.dense_ffn", "which it cuts", has_dense_layers),
    divisibility_rule("tp", "model.moe.shared_ffn", "which it cuts"),
    divisibility_rule("ep", "model.moe.experts", "which it spreads"),
    divisibility_rule("etp", "model.moe.ffn", "which it cuts"),
    ConfigRule(
        "sequences split evenly",
        ("data.seq_len", "parallel.cp", "parallel.tp"),
        lambda c: c.config.data.seq_len % sequence_multiple(c.config.parallel) == 0,
        lambda c: (
            f"data.seq_len = {c.config.data.seq_len} does not split over parallel.cp = {c.config.parallel.cp} "
            f"(two chunks a rank) and parallel.tp = {c.config.parallel.tp}"
        ),
        lambda c: f"set data.seq_len to a multiple of {sequence_multiple(c.config.parallel)}",
    ),
    ConfigRule(
        "all-to-all context has heads to swap",
        ("parallel.cp", "parallel.tp", "parallel.context", "model.attention.heads", "model.attention.kv_heads"),
        lambda c: (
            c.config.parallel.context != "all_to_all" or c.config.model.attention.kv_heads % ranks_sharing_heads(c) == 0
        ),
        lambda c: (
            f"parallel.tp x cp = {ranks_sharing_heads(c)} does not divide model.attention.kv_heads = "
            f"{c.config.model.attention.kv_heads}, which parallel.context = all_to_all spreads over both"
        ),
        lambda c: "set parallel.context to ring or all_gather",
    ),
    ConfigRule(
        "the reference loss has all words",
        ("parallel.tp", "kernels.force"),
        lambda c: c.config.parallel.tp == 1 or "cross_entropy=reference" not in c.config.kernels.force,
        lambda c: (
            f"kernels.force = {printable_text(','.join(c.config.kernels.force))} needs all words on a rank, but "
            f"parallel.tp = {c.config.parallel.tp} spreads them"
        ),
        lambda c: "set parallel.tp to 1, or leave cross_entropy=reference out",
    ),
    ConfigRule(
        "padding to capacity has a capacity",
        ("model.moe.capacity.pad", "model.moe.capacity.factor", "model.moe.capacity.over"),
        lambda c: (
            not c.config.model.moe.capacity.pad
            or (c.config.model.moe.capacity.factor > 0 and c.config.model.moe.capacity.over == "sub_sequence")
        ),
        lambda c: (
            f"model.moe.capacity.pad = true with model.moe.capacity.factor = {c.config.model.moe.capacity.factor:g} "
            f"and model.moe.capacity.over = {c.config.model.moe.capacity.over}: there is no capacity of a rank to pad to"
        ),
        lambda c: "set model.moe.capacity.factor above 0, such as 1.25, and model.moe.capacity.over to sub_sequence",
    ),
    ConfigRule(
        "the schedule takes vpp",
        ("pipeline.schedule", "pipeline.vpp"),
        lambda c: SCHEDULES[c.config.pipeline.schedule].accepts_vpp(c.config.pipeline.vpp),
        lambda c: (
            f"pipeline.schedule = {c.config.pipeline.schedule} does not run pipeline.vpp = {c.config.pipeline.vpp}"
        ),
        lambda c: f"set pipeline.vpp to {SCHEDULES[c.config.pipeline.schedule].legal_vpp}",
    ),
    ConfigRule(
        "the layout fits the model",
        ("pipeline.layout", "pipeline.vpp", "parallel.pp", "model.layers", "model.mtp", "model.moe.dense_layers"),
        lambda c: not layout_problems(c.config),
        lambda c: (
            f"pipeline.layout = {printable_text(c.config.pipeline.layout)}: {'; '.join(layout_problems(c.config))}"
        ),
        lambda c: 'set pipeline.layout to ""',
    ),
    ConfigRule(
        "there are pieces for all stages",
        ("parallel.pp", "pipeline.vpp", "model.layers", "model.mtp"),
        lambda c: pipeline_stage_count(c.config) <= pipeline_piece_count(c.config),
        lambda c: (
            f"parallel.pp x pipeline.vpp = {pipeline_stage_count(c.config)} stages are more than the model has pieces, "
            f"{pipeline_piece_count(c.config)} (embedding, layers, loss)"
        ),
        lambda c: f"set pipeline.vpp x parallel.pp to at most {pipeline_piece_count(c.config)}",
    ),
    ConfigRule(
        "several stages need several ranks",
        ("parallel.pp", "pipeline.vpp"),
        lambda c: c.config.parallel.pp > 1 or c.config.pipeline.vpp == 1,
        lambda c: f"pipeline.vpp = {c.config.pipeline.vpp} stages a rank, but parallel.pp = {c.config.parallel.pp}",
        lambda c: "set pipeline.vpp to 1, or parallel.pp to 2 or more",
    ),
]

OPTIMIZER_RULES = [
    simple_rule(
        "halves are of bf16 weights",
        ("optim.main", "train.precision"),
        lambda c: c.optim.main == "fp32" or c.train.precision in ("auto", "bf16"),
        "only bf16 weights are the upper half of fp32 ones",
        "set optim.main to fp32",
    ),
    simple_rule(
        "bf16 gradients are of bf16 weights",
        ("optim.gradients", "train.precision"),
        lambda c: c.optim.gradients == "fp32" or c.train.precision in ("auto", "bf16"),
        "gradients are kept at least as precisely as weights",
        "set optim.gradients to fp32",
    ),
    simple_rule(
        "stochastic rounding has something to round",
        ("optim.rounding", "optim.moments"),
        lambda c: c.optim.rounding == "nearest" or c.optim.moments == "bf16",
        "fp32 moments are not rounded",
        "set optim.rounding to nearest",
    ),
    ConfigRule(
        "bf16 gradients are of one microbatch",
        ("optim.gradients", "train.global_batch", "train.micro_batch"),
        lambda c: c.config.optim.gradients == "fp32" or c.share <= c.config.train.micro_batch,
        lambda c: (
            f"optim.gradients = bf16 with {c.share} sequences a rank in parts of train.micro_batch = "
            f"{c.config.train.micro_batch}: the gradients of several microbatches do not add up in bf16"
        ),
        lambda c: "set optim.gradients to fp32",
    ),
    ConfigRule(
        "bf16 gradients are sent as bf16",
        ("optim.gradients", "optim.gradient_reduce"),
        lambda c: (c.config.optim.gradients, c.config.optim.gradient_reduce) != ("bf16", "fp32") or c.world == 1,
        lambda c: (
            f"optim.gradients = bf16, but optim.gradient_reduce = fp32 between {c.world} ranks: "
            "bf16 gradients have no fp32 bits to send"
        ),
        lambda c: "set optim.gradient_reduce to bf16",
    ),
    ConfigRule(
        "optimizer groups can be read",
        ("optim.groups",),
        lambda c: not group_problems(c.config.optim.groups),
        lambda c: group_problems(c.config.optim.groups),
        lambda c: 'set optim.groups to ""',
    ),
]

RULES = CROSS_FIELD_RULES + MODEL_RULES + DIVISIBILITY_RULES + OPTIMIZER_RULES


def broken_rules(case: ConfigOnRanks, illegal: Iterable[str] = ()) -> list[str]:
    """The message and the fix of every broken rule whose keys are themselves legal."""
    skip = set(illegal)
    found = [rule for rule in RULES if not skip & set(rule.reads) and not rule.holds(case)]
    return [f"{rule.says(case)}; {rule.fix(case)}" for rule in found]


def check_config(config: Config, world: int = 1) -> Config:
    """Return the configuration if every rule holds on that many ranks; otherwise refuse with all broken rules."""
    if problems := broken_rules(ConfigOnRanks(config, world)):
        raise UserError(*problems)
    return config
