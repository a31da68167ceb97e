"""Rules between keys, as data: checks, messages and the planner's pruning use one list.

A rule is (name, reads, holds, says, fix), see config/rule.py. `reads` names its keys: a rule is skipped if one of them
is already known to be illegal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import attrgetter

from moefold.config.batch_rules import BATCH_RULES
from moefold.config.chunk_rules import CHUNK_RULES
from moefold.config.clone_rules import CLONE_RULES
from moefold.config.context_rules import CONTEXT_RULES, can_swap_heads
from moefold.config.errors import UserError
from moefold.config.fault_order import fault_problem
from moefold.config.invariance_rules import INVARIANCE_RULES
from moefold.config.lora_rules import LORA_RULES
from moefold.config.memory_rules import MEMORY_RULES
from moefold.config.mixture_weights import weight_problems
from moefold.config.model_rules import MODEL_RULES
from moefold.config.optimizer_groups import group_problems, parse_groups
from moefold.config.pair_rules import PAIR_RULES
from moefold.config.precision_rules import PRECISION_RULES
from moefold.config.preference_rules import PREFERENCE_RULES
from moefold.config.room_rules import ROOM_RULES
from moefold.config.rule import (
    ConfigOnRanks,
    ConfigRule,
    RuleList,
    divisors_in_words,
    render_message,
    set_to_divisor,
)
from moefold.config.run import BLOCK_TYPES, Config, ParallelConfig
from moefold.config.shard_rules import SHARD_RULES
from moefold.config.stash_rules import STASH_RULES
from moefold.config.static_graph_rules import STATIC_GRAPH_RULES
from moefold.config.tile_rules import TILE_RULES
from moefold.config.vocabulary_rules import VOCABULARY_RULES
from moefold.schedule import stage_layout
from moefold.schedule.schedule_catalog import SCHEDULES
from moefold.schedule.schedule_error import ScheduleError

__all__ = [
    "RULES",
    "ConfigOnRanks",
    "ConfigRule",
    "broken_rules",
    "check_config",
    "divisors_in_words",
    "sequence_multiple",
]

CHECKPOINT_PATH = re.compile(r"([A-Za-z][\w+.:-]*://)?[^\x00-\x1f:]*")
FOLDER_NAME = re.compile(r"\w[\w.+-]{0,80}", re.ASCII)
HEADS = "model.attention.heads"
KV_HEADS = "model.attention.kv_heads"
ROPE = "model.attention.rope."
CAPACITY = "model.moe.capacity."

CROSS_FIELD_RULES = RuleList()


# Checkpoints and names.


@CROSS_FIELD_RULES.rule(
    "what is kept is written",
    ("checkpoint.keep_every", "checkpoint.every"),
    says="<checkpoint.keep_every> is no multiple of <checkpoint.every>: steps to keep would not be written",
    fix="set checkpoint.keep_every to one of 0, {checkpoint.every}",
)
def kept_steps_are_written(c: ConfigOnRanks) -> bool:
    every = c.checkpoint.every
    if every == 0:
        return c.checkpoint.keep_every == 0
    return c.checkpoint.keep_every % every == 0


@CROSS_FIELD_RULES.rule(
    "the checkpoint path names a place",
    ("checkpoint.path",),
    says="<checkpoint.path> names no place; expected a folder, or a path such as s3://bucket/run",
    fix='set checkpoint.path to ""',
)
def checkpoint_path_is_usable(c: ConfigOnRanks) -> bool:
    return CHECKPOINT_PATH.fullmatch(c.checkpoint.path) is not None


@CROSS_FIELD_RULES.rule(
    "routing is not recorded over what is replayed",
    ("train.record_routing", "train.replay_routing"),
    says="<train.record_routing> and <train.replay_routing> are the same file, which would be overwritten",
    fix='set train.record_routing to ""',
)
def routing_files_differ(c: ConfigOnRanks) -> bool:
    recorded = c.train.record_routing
    return recorded == "" or recorded != c.train.replay_routing


@CROSS_FIELD_RULES.rule(
    "the name can be a folder's",
    ("name",),
    says="<name> cannot name a folder; expected letters, digits and . _ + -",
    fix="set name to something like my-run",
)
def name_can_be_a_folder(c: ConfigOnRanks) -> bool:
    return FOLDER_NAME.fullmatch(c.name) is not None


def describe_fault(c: ConfigOnRanks) -> str:
    shown = render_message("<observe.fault>", c)
    problem = fault_problem(c.observe.fault)
    return f"{shown} {problem}; expected something like nan weight=head.norm.weight rank=0 step=3"


@CROSS_FIELD_RULES.rule(
    "the fault can be injected",
    ("observe.fault",),
    says=describe_fault,
    fix='set observe.fault to ""',
)
def fault_can_be_injected(c: ConfigOnRanks) -> bool:
    return fault_problem(c.observe.fault) is None


@CROSS_FIELD_RULES.rule(
    "compared weights are whole until the update",
    ("observe.compare_every", "optim.when"),
    says="<observe.compare_every> with <optim.when>: checksums are taken behind backward, which updates weights",
    fix="set observe.compare_every to 0",
)
def compared_weights_are_whole(c: ConfigOnRanks) -> bool:
    return c.observe.compare_every == 0 or c.optim.when == "step"


@CROSS_FIELD_RULES.rule(
    "skipped spikes are looked for",
    ("train.skip_spikes", "observe.spike", "optim.when"),
    says="<train.skip_spikes> with <observe.spike> and <optim.when>: spikes are found where observe.spike is above 0, "
    "and known behind backward",
    fix="set train.skip_spikes to false",
)
def skipped_spikes_are_looked_for(c: ConfigOnRanks) -> bool:
    return not c.train.skip_spikes or (c.observe.spike > 0 and c.optim.when == "step")


# Sizes of the model.


@CROSS_FIELD_RULES.rule(
    "kv heads divide heads",
    (HEADS, KV_HEADS),
    says="<model.attention.kv_heads> does not divide <model.attention.heads>",
    fix=set_to_divisor(KV_HEADS, of=HEADS),
)
def kv_heads_divide_heads(c: ConfigOnRanks) -> bool:
    a = c.model.attention
    return a.heads % a.kv_heads == 0


def advise_even_head_dim(c: ConfigOnRanks) -> str:
    return f"set model.attention.head_dim to {c.model.attention.head_dim + 1}"


@CROSS_FIELD_RULES.rule(
    "head width is even",
    ("model.attention.head_dim",),
    says="<model.attention.head_dim> is odd; RoPE rotates pairs",
    fix=advise_even_head_dim,
)
def head_width_is_even(c: ConfigOnRanks) -> bool:
    return c.model.attention.head_dim % 2 == 0


@CROSS_FIELD_RULES.rule(
    "top-k within experts",
    ("model.moe.top_k", "model.moe.experts"),
    says="<model.moe.top_k> exceeds <model.moe.experts>",
    fix="set model.moe.top_k to at most {model.moe.experts}",
)
def top_k_within_experts(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    return moe.top_k <= moe.experts


@CROSS_FIELD_RULES.rule(
    "dense layers within layers",
    ("model.moe.dense_layers", "model.layers", "model.mtp"),
    says="<model.moe.dense_layers> exceeds <model.layers> and the further layers of <model.mtp>",
    fix="set model.moe.dense_layers to at most {model.layers}",
)
def dense_layers_within_layers(c: ConfigOnRanks) -> bool:
    model = c.model
    return model.moe.dense_layers <= model.layers + model.mtp


# Rotary frequencies.


@CROSS_FIELD_RULES.rule(
    "llama3 frequencies in order",
    (ROPE + "low_frequency", ROPE + "high_frequency", ROPE + "scaling"),
    says="<model.attention.rope.low_frequency> is not below <model.attention.rope.high_frequency>",
    fix="set model.attention.rope.high_frequency above {model.attention.rope.low_frequency}",
)
def llama3_frequencies_in_order(c: ConfigOnRanks) -> bool:
    rope = c.model.attention.rope
    return rope.scaling != "llama3" or rope.low_frequency < rope.high_frequency


# Data.


def describe_files(c: ConfigOnRanks) -> str:
    if not c.data.files:
        return render_message("<data.source>, but data.files is empty", c)
    return render_message("<data.files>, but <data.source>", c)


@CROSS_FIELD_RULES.rule(
    "files are named",
    ("data.source", "data.files"),
    says=describe_files,
    fix="set data.files to your files, such as --data.files corpus.txt",
)
def files_are_named(c: ConfigOnRanks) -> bool:
    reads_files = c.data.source in ("files", "prepared")
    return reads_files == bool(c.data.files)


def describe_weights(c: ConfigOnRanks) -> str:
    if c.data.source != "prepared":
        return render_message("<data.weights>, but <data.source> is one source", c)
    return weight_problems(c.data.weights, len(c.data.files))


@CROSS_FIELD_RULES.rule(
    "weights are of prepared sources",
    ("data.weights", "data.source", "data.files"),
    says=describe_weights,
    fix='set data.weights to ""',
)
def weights_are_of_prepared_sources(c: ConfigOnRanks) -> bool:
    return not c.data.weights or not describe_weights(c)


@CROSS_FIELD_RULES.rule(
    "samples are read from files",
    ("data.format", "data.source"),
    why="samples are lines of files; prepared chats and pairs have their masks already",
    fix="set data.format to text",
)
def samples_are_read_from_files(c: ConfigOnRanks) -> bool:
    if c.data.source == "prepared":
        return c.data.format in ("text", "preferences")
    return c.data.format == "text" or c.data.source not in ("stdlib", "zipf")


@CROSS_FIELD_RULES.rule(
    "there are documents to attend within",
    ("data.attend", "data.source"),
    why="random tokens are one document without end",
    fix="set data.attend to sequence",
)
def source_has_documents(c: ConfigOnRanks) -> bool:
    return c.data.attend == "sequence" or c.data.source != "zipf"


@CROSS_FIELD_RULES.rule(
    "packed documents attend within themselves",
    ("data.packing", "data.attend"),
    why="documents of one bin have nothing to do with each other",
    fix="set data.attend to document",
)
def packed_documents_attend_within(c: ConfigOnRanks) -> bool:
    return c.data.packing == "windows" or c.data.attend == "document"


@CROSS_FIELD_RULES.rule(
    "packed documents are routed by themselves",
    ("data.packing", "model.moe.router.kind", "model.moe.capacity.factor"),
    why="choices over whole bins would depend on how documents are packed",
    fix="set data.packing to windows",
)
def packed_documents_are_routed_alone(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    is_alone = moe.router.kind == "token_choice" and not moe.capacity.factor
    return c.data.packing == "windows" or is_alone


@CROSS_FIELD_RULES.rule(
    "bytes fit the vocabulary",
    ("data.tokenizer", "model.vocab"),
    says="<model.vocab> cannot hold the 256 tokens of data.tokenizer = byte",
    fix="set model.vocab to 256 or more",
)
def bytes_fit_the_vocabulary(c: ConfigOnRanks) -> bool:
    reads_bytes = c.data.tokenizer in ("auto", "byte")
    return not reads_bytes or c.model.vocab >= 256


# Grids of ranks and batches.


def advise_rank_count(ranks: int, world: int) -> str:
    return f"start a multiple of {ranks} ranks, or choose a product among {divisors_in_words(world)}"


def advise_dense_ranks(c: ConfigOnRanks) -> str:
    return advise_rank_count(c.dense_model_ranks, c.world)


def advise_expert_ranks(c: ConfigOnRanks) -> str:
    return advise_rank_count(c.expert_model_ranks, c.world)


@CROSS_FIELD_RULES.rule(
    "dense grid fits the world",
    ("parallel.tp", "parallel.cp", "parallel.pp"),
    says="parallel.tp x cp x pp = {dense_model_ranks} does not divide the number of ranks, {world}",
    fix=advise_dense_ranks,
)
def dense_grid_fits_the_world(c: ConfigOnRanks) -> bool:
    return c.world % c.dense_model_ranks == 0


@CROSS_FIELD_RULES.rule(
    "expert grid fits the world",
    ("parallel.ep", "parallel.etp", "parallel.pp"),
    says="parallel.etp x ep x pp = {expert_model_ranks} does not divide the number of ranks, {world}",
    fix=advise_expert_ranks,
)
def expert_grid_fits_the_world(c: ConfigOnRanks) -> bool:
    return c.world % c.expert_model_ranks == 0


def advise_batch(c: ConfigOnRanks) -> str:
    if c.train.global_batch % c.dp:
        return f"set train.global_batch to a multiple of {c.dp * c.train.micro_batch}"
    return f"set train.micro_batch to one of {divisors_in_words(c.train.global_batch // c.dp)}"


@CROSS_FIELD_RULES.rule(
    "global batch splits evenly",
    ("train.global_batch", "train.micro_batch", "parallel.tp", "parallel.cp", "parallel.pp"),
    says="<train.global_batch> does not split over {dp} data-parallel ranks in parts of <train.micro_batch>",
    fix=advise_batch,
)
def global_batch_splits_evenly(c: ConfigOnRanks) -> bool:
    microbatch = min(c.train.micro_batch, c.share)
    return c.train.global_batch % (c.dp * microbatch) == 0


def divisibility_rule(
    degree: str,
    key: str,
    what: str,
    applies: Callable[[ConfigOnRanks], bool] | None = None,
) -> ConfigRule:
    """`parallel.DEGREE` must divide the whole number at `key`."""
    degree_key = f"parallel.{degree}"

    def degree_divides(c: ConfigOnRanks) -> bool:
        if applies is not None and not applies(c):
            return True
        number = attrgetter(key)(c)
        ranks = attrgetter(degree_key)(c)
        return number % ranks == 0

    def describe_remainder(c: ConfigOnRanks) -> str:
        return render_message(f"<{degree_key}> does not divide <{key}>, {what}", c)

    advice = set_to_divisor(degree_key, of=key)
    return ConfigRule(f"{degree} splits {key}", (degree_key, key), degree_divides, describe_remainder, advice)


def sequence_multiple(p: ParallelConfig) -> int:
    """The required divisor of a sequence's length: two chunks for each cp rank, sharded over tp."""
    chunks = 2 if p.cp > 1 else 1
    return p.tp * p.cp * chunks


def has_dense_layers(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    return moe.dense_layers > 0 or moe.every > 1


def pipeline_stage_count(c: ConfigOnRanks) -> int:
    return c.parallel.pp * c.pipeline.vpp


def pipeline_piece_count(c: ConfigOnRanks) -> int:
    """Number of pieces of the model: layers, MTP layers, embedding and loss."""
    return c.model.layers + c.model.mtp + 2


def layout_problems(c: ConfigOnRanks) -> list[str]:
    """Problems of the layout string; none where it is empty."""
    model = c.model
    if not c.pipeline.layout:
        return []
    stages = pipeline_stage_count(c)
    try:
        layout = stage_layout.parse_layout(c.pipeline.layout)
        dense_layers = model.moe.dense_layers
        return stage_layout.stage_layout_problems(layout, stages, model.layers, dense_layers, model.mtp)
    except ScheduleError as unsound:
        return list(unsound.problems)


DIVISIBILITY_RULES = RuleList(
    [
        divisibility_rule("tp", HEADS, "whose heads it shards"),
        divisibility_rule("tp", "model.vocab", "which it shards"),
        divisibility_rule("tp", "model.dense_ffn", "which it shards", has_dense_layers),
        divisibility_rule("tp", "model.moe.shared_ffn", "which it shards"),
        divisibility_rule("ep", "model.moe.experts", "which it spreads"),
        divisibility_rule("etp", "model.moe.ffn", "which it shards"),
    ]
)


def advise_kv_split(c: ConfigOnRanks) -> str:
    return f"set parallel.tp to one of {divisors_in_words(c.model.attention.kv_heads)}"


@DIVISIBILITY_RULES.rule(
    "tp splits model.attention.kv_heads",
    ("parallel.tp", KV_HEADS),
    says="<parallel.tp> does not divide <model.attention.kv_heads>, whose heads it shards, and is no multiple of it, "
    "with which ranks could share heads evenly",
    fix=advise_kv_split,
)
def tp_splits_kv_heads(c: ConfigOnRanks) -> bool:
    tp, kv_heads = c.parallel.tp, c.model.attention.kv_heads
    return kv_heads % tp == 0 or tp % kv_heads == 0


# Context parallelism and kernels.


def advise_sequence_length(c: ConfigOnRanks) -> str:
    return f"set data.seq_len to a multiple of {sequence_multiple(c.parallel)}"


@DIVISIBILITY_RULES.rule(
    "sequences split evenly",
    ("data.seq_len", "parallel.cp", "parallel.tp"),
    says="<data.seq_len> does not split over <parallel.cp> (two chunks a rank) and <parallel.tp>",
    fix=advise_sequence_length,
)
def sequences_split_evenly(c: ConfigOnRanks) -> bool:
    return c.data.seq_len % sequence_multiple(c.parallel) == 0


def describe_head_split(c: ConfigOnRanks) -> str:
    heads = c.model.attention.heads // c.parallel.tp
    ranks = f"<parallel.cp> ranks with <parallel.context> do not share {heads} query heads of a rank evenly"
    return render_message(f"{ranks}, <model.attention.kv_heads>", c)


@DIVISIBILITY_RULES.rule(
    "all-to-all context has heads to swap",
    ("parallel.cp", "parallel.tp", "parallel.context", HEADS, KV_HEADS),
    says=describe_head_split,
    fix="set parallel.context to ring or all_gather",
)
def all_to_all_context_has_heads(c: ConfigOnRanks) -> bool:
    return c.parallel.context != "all_to_all" or can_swap_heads(c, c.parallel.cp)


@DIVISIBILITY_RULES.rule(
    "the reference loss has the whole vocabulary",
    ("parallel.tp", "kernels.force"),
    says="<kernels.force> needs the whole vocabulary on a rank, but <parallel.tp> shards it",
    fix="set parallel.tp to 1, or leave cross_entropy=reference out",
)
def reference_loss_has_the_vocabulary(c: ConfigOnRanks) -> bool:
    return c.parallel.tp == 1 or "cross_entropy=reference" not in c.kernels.force


@DIVISIBILITY_RULES.rule(
    "padding to capacity has a capacity",
    (CAPACITY + "pad", CAPACITY + "factor", CAPACITY + "over"),
    says="<model.moe.capacity.pad> with <model.moe.capacity.factor> and <model.moe.capacity.over>: "
    "there is no capacity of a rank to pad to",
    fix="set model.moe.capacity.factor above 0, such as 1.25, and model.moe.capacity.over to sub_sequence",
)
def padding_has_a_capacity(c: ConfigOnRanks) -> bool:
    capacity = c.model.moe.capacity
    if not capacity.pad:
        return True
    return capacity.factor > 0 and capacity.over == "sub_sequence"


# Pipeline.


def advise_vpp(c: ConfigOnRanks) -> str:
    return f"set pipeline.vpp to {SCHEDULES[c.pipeline.schedule].legal_vpp}"


@DIVISIBILITY_RULES.rule(
    "the schedule takes vpp",
    ("pipeline.schedule", "pipeline.vpp"),
    says="<pipeline.schedule> does not run <pipeline.vpp>",
    fix=advise_vpp,
)
def schedule_takes_vpp(c: ConfigOnRanks) -> bool:
    schedule = SCHEDULES[c.pipeline.schedule]
    return schedule.accepts_vpp(c.pipeline.vpp)


def describe_layout(c: ConfigOnRanks) -> str:
    problems = "; ".join(layout_problems(c))
    return render_message("<pipeline.layout>: ", c) + problems


@DIVISIBILITY_RULES.rule(
    "the layout fits the model",
    ("pipeline.layout", "pipeline.vpp", "parallel.pp", "model.layers", "model.mtp", "model.moe.dense_layers"),
    says=describe_layout,
    fix='set pipeline.layout to ""',
)
def layout_fits_the_model(c: ConfigOnRanks) -> bool:
    return not layout_problems(c)


def describe_stages(c: ConfigOnRanks) -> str:
    stages = pipeline_stage_count(c)
    pieces = pipeline_piece_count(c)
    return (
        f"parallel.pp x pipeline.vpp = {stages} stages, but the model has only {pieces} pieces "
        "(embedding, layers, loss)"
    )


def advise_stages(c: ConfigOnRanks) -> str:
    return f"set pipeline.vpp x parallel.pp to at most {pipeline_piece_count(c)}"


@DIVISIBILITY_RULES.rule(
    "there are pieces for all stages",
    ("parallel.pp", "pipeline.vpp", "model.layers", "model.mtp"),
    says=describe_stages,
    fix=advise_stages,
)
def stages_have_pieces(c: ConfigOnRanks) -> bool:
    return pipeline_stage_count(c) <= pipeline_piece_count(c)


@DIVISIBILITY_RULES.rule(
    "several stages need several ranks",
    ("parallel.pp", "pipeline.vpp"),
    says="<pipeline.vpp> stages a rank, but <parallel.pp>",
    fix="set pipeline.vpp to 1, or parallel.pp to 2 or more",
)
def several_stages_have_several_ranks(c: ConfigOnRanks) -> bool:
    return c.parallel.pp > 1 or c.pipeline.vpp == 1


OPTIMIZER_RULES = RuleList()
# Of which equal gradients add up: behind twice as many, each is less than half a code of the sum
MOST_MICROBATCHES = {"bf16": 1, "fp8": 8, "int8": 32, "fp16": 1024}


@OPTIMIZER_RULES.rule(
    "split main weights are of bf16 weights",
    ("optim.main", "train.precision"),
    why="only bf16 weights are the upper half of fp32 ones, or can do without them",
    fix="set optim.main to fp32",
)
def split_weights_are_bf16(c: ConfigOnRanks) -> bool:
    may_be_bf16 = c.train.precision in ("auto", "bf16")
    return may_be_bf16 or c.optim.main == "fp32"


@OPTIMIZER_RULES.rule(
    "bf16 gradients are of bf16 weights",
    ("optim.gradients", "train.precision"),
    why="gradients are kept at least as precisely as weights",
    fix="set optim.gradients to fp32",
)
def bf16_gradients_of_bf16_weights(c: ConfigOnRanks) -> bool:
    may_be_bf16 = c.train.precision in ("auto", "bf16")
    return may_be_bf16 or c.optim.gradients == "fp32"


@OPTIMIZER_RULES.rule(
    "stochastic rounding has something to round",
    ("optim.rounding", "optim.moments", "optim.second_moment"),
    why="bf16 moments alone are rounded stochastically",
    fix="set optim.rounding to nearest",
)
def stochastic_rounding_has_bf16_moments(c: ConfigOnRanks) -> bool:
    return c.optim.rounding == "nearest" or "bf16" in (c.optim.moments, c.optim.second_moment)


@OPTIMIZER_RULES.rule(
    "rounding of main weights has something to round",
    ("optim.main_rounding", "optim.main"),
    why="fp32 main weights, whole or split, are not rounded",
    fix="set optim.main_rounding to stochastic",
)
def main_rounding_has_main_weights(c: ConfigOnRanks) -> bool:
    return c.optim.main_rounding == "stochastic" or c.optim.main not in ("fp32", "split")


def uses_muon(c: ConfigOnRanks) -> bool:
    if c.optim.rule == "muon":
        return True
    return not group_problems(c.optim.groups) and any(entry.rule == "muon" for entry in parse_groups(c.optim.groups))


@OPTIMIZER_RULES.rule(
    "moments in blocks are AdamW's",
    ("optim.moments", "optim.rule", "optim.groups"),
    why="Muon's momentum has no blocks with scales",
    fix="set optim.moments to bf16",
)
def block_moments_are_adamws(c: ConfigOnRanks) -> bool:
    return c.optim.moments in ("fp32", "bf16") or not uses_muon(c)


@OPTIMIZER_RULES.rule(
    "main weights in blocks are AdamW's",
    ("optim.main", "optim.rule", "optim.groups"),
    why="Muon's main weights have no blocks with scales",
    fix="set optim.main to split",
)
def block_main_weights_are_adamws(c: ConfigOnRanks) -> bool:
    return c.optim.main not in BLOCK_TYPES or not uses_muon(c)


@OPTIMIZER_RULES.rule(
    "states on the host are read by their update alone",
    ("optim.states", "optim.qk_clip", "precision.storage"),
    says="<optim.states> with <optim.qk_clip> and <precision.storage>: clipped heads and weights stored in FP8 are "
    "made from main weights behind the update, when these are on the host again",
    fix="set optim.states to device",
)
def host_states_are_read_by_their_update(c: ConfigOnRanks) -> bool:
    if c.optim.states == "device":
        return True
    return c.optim.qk_clip == 0 and c.precision.storage == "plain"


@OPTIMIZER_RULES.rule(
    "updates on the host are AdamW's",
    ("optim.update", "optim.rule", "optim.groups"),
    why="Muon's matrices are orthogonalised on the device, which their states visit",
    fix="set optim.update to device",
)
def host_updates_are_adamws(c: ConfigOnRanks) -> bool:
    return c.optim.update == "device" or not uses_muon(c)


@OPTIMIZER_RULES.rule(
    "updates on the host have fp32 states there",
    ("optim.update", "optim.states", "optim.moments", "optim.second_moment", "optim.main"),
    says="<optim.update> with <optim.states>, <optim.moments>, <optim.second_moment> and <optim.main>: "
    "the host updates fp32 states that it has",
    fix="set optim.update to device",
)
def host_updates_have_fp32_states(c: ConfigOnRanks) -> bool:
    optim = c.optim
    if optim.update == "device":
        return True
    is_fp32 = (optim.moments, optim.main) == ("fp32", "fp32") and optim.second_moment in ("as_first", "fp32")
    return optim.states == "host" and is_fp32


@OPTIMIZER_RULES.rule(
    "updates in backward know their clipping",
    ("optim.when", "optim.clip_by"),
    why="the norm of all gradients is known only when backward has ended",
    fix="set optim.clip_by to previous or unit",
)
def updates_in_backward_know_their_clipping(c: ConfigOnRanks) -> bool:
    return c.optim.when == "step" or c.optim.clip_by != "global"


@OPTIMIZER_RULES.rule(
    "updates in backward are never skipped",
    ("optim.when", "train.precision"),
    why="a step in fp16 that overflows is skipped as a whole, which is known only when backward has ended",
    fix="set optim.when to step, or train.precision to bf16",
)
def updates_in_backward_are_never_skipped(c: ConfigOnRanks) -> bool:
    return c.optim.when == "step" or c.train.precision != "fp16"


@OPTIMIZER_RULES.rule(
    "units are of one stage",
    ("optim.when", "optim.clip_by", "parallel.pp"),
    says="<optim.when> and <optim.clip_by> with <parallel.pp>: units of other stages are complete at other times",
    fix="set optim.when to step and optim.clip_by to previous",
)
def units_are_of_one_stage(c: ConfigOnRanks) -> bool:
    return c.parallel.pp == 1 or (c.optim.when == "step" and c.optim.clip_by != "unit")


@OPTIMIZER_RULES.rule(
    "sums of gradients tell a microbatch's apart",
    ("optim.gradients", "train.global_batch", "train.micro_batch"),
    says="<optim.gradients> with {share} sequences a rank in parts of <train.micro_batch>: gradients are accumulated "
    "over one microbatch at most in bf16, 8 in fp8, 32 in int8, 1024 in fp16",
    fix="set optim.gradients to fp32",
)
def sums_tell_gradients_apart(c: ConfigOnRanks) -> bool:
    most = MOST_MICROBATCHES.get(c.optim.gradients)
    return most is None or c.share <= most * c.train.micro_batch


@OPTIMIZER_RULES.rule(
    "gradients in blocks are AdamW's",
    ("optim.gradients", "optim.rule", "optim.groups"),
    why="other rules do not read gradients in blocks with scales",
    fix="set optim.gradients to fp32",
)
def block_gradients_are_adamws(c: ConfigOnRanks) -> bool:
    named = () if group_problems(c.optim.groups) else parse_groups(c.optim.groups)
    rules = {c.optim.rule, *(entry.rule for entry in named if entry.rule)}
    return c.optim.gradients not in BLOCK_TYPES or rules == {"adamw"}


@OPTIMIZER_RULES.rule(
    "gradients in blocks have a place of their own",
    ("optim.gradients", "shard.mode", "memory.graphs", "memory.tape", "optim.update"),
    says="<optim.gradients> with <shard.mode>, <memory.graphs>, <memory.tape> and <optim.update>: shares of fully "
    "sharded units are summed in fp32, and captured or replayed steps and updates on the host read plain gradients",
    fix="set optim.gradients to fp32",
)
def block_gradients_are_of_whole_weights(c: ConfigOnRanks) -> bool:
    if c.optim.gradients not in BLOCK_TYPES:
        return True
    captured = c.memory.graphs != "none" or c.memory.tape
    return c.shard.mode != "zero3" and not captured and c.optim.update == "device"


@OPTIMIZER_RULES.rule(
    "bf16 gradients are sent as bf16 or fp8",
    ("optim.gradients", "optim.gradient_reduce"),
    says="<optim.gradients>, but <optim.gradient_reduce> between {world} ranks: "
    "bf16 gradients have no fp32 bits to send",
    fix="set optim.gradient_reduce to bf16",
)
def bf16_gradients_are_not_sent_as_fp32(c: ConfigOnRanks) -> bool:
    if c.world == 1 or c.optim.gradients == "fp32":
        return True
    return c.optim.gradient_reduce != "fp32"


@OPTIMIZER_RULES.rule(
    "FP8 gradients are sent",
    ("optim.gradient_reduce", "parallel.pp"),
    says="<optim.gradient_reduce> with {world} ranks and <parallel.pp>: a stage has one rank, so no gradient is sent",
    fix="set optim.gradient_reduce to fp32",
)
def fp8_gradients_are_sent(c: ConfigOnRanks) -> bool:
    return c.optim.gradient_reduce != "fp8" or c.world > c.parallel.pp


def optimizer_group_problems(c: ConfigOnRanks) -> str:
    return group_problems(c.optim.groups)


@OPTIMIZER_RULES.rule(
    "optimizer groups can be read",
    ("optim.groups",),
    says=optimizer_group_problems,
    fix='set optim.groups to ""',
)
def optimizer_groups_can_be_read(c: ConfigOnRanks) -> bool:
    return not optimizer_group_problems(c)


@OPTIMIZER_RULES.rule(
    "clipped logits are not normed",
    ("optim.qk_clip", "model.attention.qk_norm"),
    why="a norm of queries and keys takes away what clipping does to their projections",
    fix="set optim.qk_clip to 0",
)
def clipped_logits_are_not_normed(c: ConfigOnRanks) -> bool:
    return c.optim.qk_clip == 0 or c.model.attention.qk_norm == "none"


RULES: list[ConfigRule] = [
    *CROSS_FIELD_RULES,
    *MODEL_RULES,
    *DIVISIBILITY_RULES,
    *OPTIMIZER_RULES,
    *LORA_RULES,
    *PREFERENCE_RULES,
    *BATCH_RULES,
    *PRECISION_RULES,
    *MEMORY_RULES,
    *STASH_RULES,
    *ROOM_RULES,
    *STATIC_GRAPH_RULES,
    *PAIR_RULES,
    *VOCABULARY_RULES,
    *SHARD_RULES,
    *CLONE_RULES,
    *CHUNK_RULES,
    *TILE_RULES,
    *CONTEXT_RULES,
    *INVARIANCE_RULES,
]


def broken_rules(case: ConfigOnRanks, illegal: Iterable[str] = ()) -> list[str]:
    """The message and the fix of every broken rule whose keys are themselves legal."""
    skipped = set(illegal)
    messages: list[str] = []
    for rule in RULES:
        is_legal = skipped.isdisjoint(rule.reads)
        if is_legal and not rule.holds(case):
            messages.append(f"{rule.says(case)}; {rule.fix(case)}")
    return messages


def check_config(config: Config, world: int = 1) -> Config:
    """Return the configuration if every rule holds on that many ranks; otherwise refuse with all broken rules."""
    problems = broken_rules(ConfigOnRanks(config, world))
    if problems:
        raise UserError(*problems)
    return config
