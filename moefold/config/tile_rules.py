"""Rules of `parallel.tiles`: names that are known, and what the products of each do not have."""

from __future__ import annotations

from contextlib import suppress

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.keys import format_value
from moefold.config.memory_regions import parse_offload, without_presets
from moefold.config.memory_rules import layer_count, recomputed_regions
from moefold.config.precision_rules import recipes_in_use
from moefold.config.rule import ConfigOnRanks, RuleList
from moefold.config.tile_names import TILE_NAMES

TILES = "parallel.tiles"
NONE = '""'

TILE_RULES = RuleList()


def unknown_tiles(c: ConfigOnRanks) -> str:
    """What is wrong with the names, as one text; empty if nothing is."""
    problems: list[str] = []
    for name in c.parallel.tiles:
        if name not in TILE_NAMES:
            problems.append(f'"{printable_text(name)}" names no tiles{did_you_mean(name, TILE_NAMES)}')
    given = printable_text(format_value(c.parallel.tiles))
    return f"{TILES} = {given}: {'; '.join(problems)}; there are: {', '.join(TILE_NAMES)}" if problems else ""


@TILE_RULES.rule(
    "tiles are known",
    (TILES,),
    says=unknown_tiles,
    fix=f"set {TILES} to {NONE}",
)
def tiles_are_known(c: ConfigOnRanks) -> bool:
    return not unknown_tiles(c)


def without(c: ConfigOnRanks, *names: str) -> str:
    others = [other for other in c.parallel.tiles if other not in names]
    return f"set {TILES} to {format_value(tuple(others)) or NONE}"


def has_pairs(c: ConfigOnRanks) -> bool:
    """Whether two passes share a slot."""
    return c.pipeline.pair or c.pipeline.schedule == "dualpipe_v"


# Routed experts.

EXPERTS = "experts"


def has_tiled_experts(c: ConfigOnRanks) -> bool:
    return EXPERTS in c.parallel.tiles


def without_experts(c: ConfigOnRanks) -> str:
    return without(c, EXPERTS)


@TILE_RULES.rule(
    "tiled experts have an arena",
    (TILES, "parallel.dispatcher"),
    why="tiles of experts wait for what ranks write into each other's memory",
    fix="set parallel.dispatcher to symmetric",
)
def tiled_experts_have_an_arena(c: ConfigOnRanks) -> bool:
    return not has_tiled_experts(c) or c.parallel.dispatcher == "symmetric"


@TILE_RULES.rule(
    "tiled experts have ranks that send",
    (TILES, "parallel.ep", "parallel.etp"),
    why="a rank that holds all experts exchanges nothing that they could run inside",
    fix=without_experts,
)
def tiled_experts_have_ranks_that_send(c: ConfigOnRanks) -> bool:
    return not has_tiled_experts(c) or c.parallel.ep * c.parallel.etp > 1


@TILE_RULES.rule(
    "tiled experts are plain SwiGLU",
    (TILES, "model.moe.activation", "model.moe.biases", "model.moe.gate"),
    why="their kernels have SwiGLU with the router's weight inside, and no biases",
    fix=without_experts,
)
def tiled_experts_are_plain_swiglu(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    is_plain = moe.activation == "swiglu" and moe.gate == "activation" and not moe.biases
    return not has_tiled_experts(c) or is_plain


@TILE_RULES.rule(
    "tiled experts multiply plain numbers",
    (TILES, "precision.recipe", "precision.recipes"),
    why="their kernels gather tokens as they arrive, and quantise none",
    fix="set precision.recipe to plain",
)
def tiled_experts_are_not_quantised(c: ConfigOnRanks) -> bool:
    quantises = any(spec.quantises for spec in recipes_in_use(c))
    return not has_tiled_experts(c) or not quantises


@TILE_RULES.rule(
    "tokens of tiled experts travel as they are",
    (TILES, "precision.dispatch", "precision.combine_gradient"),
    why="tiles read tokens where they arrive, in the experts' own type",
    fix="set precision.dispatch and precision.combine_gradient to plain",
)
def tokens_of_tiled_experts_are_plain(c: ConfigOnRanks) -> bool:
    sent = {c.precision.dispatch, c.precision.combine_gradient}
    return not has_tiled_experts(c) or sent == {"plain"}


@TILE_RULES.rule(
    "tiled experts have no adapters",
    (TILES, "lora.rank"),
    why="outputs of adapters are not inside their kernels",
    fix=without_experts,
)
def tiled_experts_have_no_adapters(c: ConfigOnRanks) -> bool:
    return not has_tiled_experts(c) or c.lora.rank == 0


@TILE_RULES.rule(
    "tiled experts have all rows at once",
    (TILES, "parallel.row_chunks", "memory.expert_chunk", "memory.stash"),
    why="chunks and the stash have rows of experts between dispatch and combine, which are one step of a kernel here",
    fix=without_experts,
)
def tiled_experts_have_all_rows_at_once(c: ConfigOnRanks) -> bool:
    is_split = c.parallel.row_chunks > 1 or c.memory.expert_chunk > 0
    return not has_tiled_experts(c) or not (is_split or c.memory.stash != "none")


@TILE_RULES.rule(
    "tiled experts are of one pass at a time",
    (TILES, "pipeline.pair", "pipeline.schedule"),
    why="two passes of a slot run on two lanes, one of which sends, and tiles send and multiply at once",
    fix="set pipeline.pair to false and pipeline.schedule to zb_v",
)
def tiled_experts_are_of_one_pass(c: ConfigOnRanks) -> bool:
    return not has_tiled_experts(c) or not has_pairs(c)


REGIONS_INSIDE = {"dispatch", "experts", "activation"}


@TILE_RULES.rule(
    "nothing inside tiled experts is recomputed by itself",
    (TILES, "memory.recompute", "model.layers", "model.mtp"),
    why="of dispatch and experts, which are one, neither is a region; moe and layer are",
    fix="set memory.recompute to moe",
)
def tiled_experts_are_recomputed_as_one(c: ConfigOnRanks) -> bool:
    return not has_tiled_experts(c) or REGIONS_INSIDE.isdisjoint(recomputed_regions(c))


@TILE_RULES.rule(
    "nothing inside tiled experts is offloaded by itself",
    (TILES, "memory.offload", "model.layers", "model.mtp"),
    why="dispatch and experts are one, and neither is a region",
    fix='set memory.offload to ""',
)
def tiled_experts_are_not_offloaded(c: ConfigOnRanks) -> bool:
    regions: set[str] = set()
    with suppress(UserError):  # reported by a rule of offload
        regions = set(parse_offload(c.memory.offload, layer_count(c)))
    return not has_tiled_experts(c) or REGIONS_INSIDE.isdisjoint(regions)


@TILE_RULES.rule(
    "tiled experts are launched by the host",
    (TILES, "memory.graphs"),
    why="kernels whose programs wait for each other were never captured",
    fix="set memory.graphs to none",
)
def tiled_experts_are_launched_by_the_host(c: ConfigOnRanks) -> bool:
    return not has_tiled_experts(c) or c.memory.graphs == "none"


@TILE_RULES.rule(
    "tiled experts are bf16 on a GPU",
    (TILES, "train.device", "train.precision"),
    why="their kernels multiply in bf16 there",
    fix="set train.precision to bf16",
)
def tiled_experts_are_bf16_on_a_gpu(c: ConfigOnRanks) -> bool:
    is_bf16 = c.train.device != "cuda" or c.train.precision in ("auto", "bf16")
    return not has_tiled_experts(c) or is_bf16


# Dense products: projections of tensor-parallel ranks, and those to and from the heads of ranks that share sequences.

PROJECTIONS = "projections"
HEADS = "heads"
DENSE = (PROJECTIONS, HEADS)


def exchanges_in_projections(c: ConfigOnRanks) -> bool:
    """Whether dense products are inside exchanges, of either kind."""
    return not set(DENSE).isdisjoint(c.parallel.tiles)


def without_projections(c: ConfigOnRanks) -> str:
    return without(c, *DENSE)


@TILE_RULES.rule(
    "projections inside exchanges have tensor-parallel ranks",
    (TILES, "parallel.tp"),
    why="one rank gathers no rows and scatters no sums",
    fix="set parallel.tp to 2",
)
def exchanged_projections_have_ranks(c: ConfigOnRanks) -> bool:
    return PROJECTIONS not in c.parallel.tiles or c.parallel.tp > 1


def swapping_ranks(c: ConfigOnRanks) -> str:
    fix = "set parallel.context to all_to_all"
    return fix if c.parallel.cp > 1 else f"{fix} and parallel.cp to 2"


@TILE_RULES.rule(
    "heads inside exchanges have ranks that swap them",
    (TILES, "parallel.context", "parallel.cp"),
    why="heads are swapped for positions by all-to-all context over several ranks alone, which is to be asked for",
    fix=swapping_ranks,
)
def exchanged_heads_have_ranks(c: ConfigOnRanks) -> bool:
    return HEADS not in c.parallel.tiles or (c.parallel.context == "all_to_all" and c.parallel.cp > 1)


@TILE_RULES.rule(
    "heads inside exchanges are not cut by tensor parallelism",
    (TILES, "parallel.tp"),
    why="the projection back sums over heads of all cp ranks in its kernel, and over tp by another exchange",
    fix="set parallel.tp to 1",
)
def exchanged_heads_are_not_cut(c: ConfigOnRanks) -> bool:
    return HEADS not in c.parallel.tiles or c.parallel.tp == 1


@TILE_RULES.rule(
    "heads inside exchanges are of grouped-query attention",
    (TILES, "model.attention.kind", "model.attention.qk_norm"),
    why="a rank's share of the columns of query, key and value has to be heads that are normed one by one",
    fix=lambda c: without(c, HEADS),
)
def exchanged_heads_are_grouped(c: ConfigOnRanks) -> bool:
    attention = c.model.attention
    is_by_head = attention.kind == "gqa" and attention.qk_norm != "full"
    return HEADS not in c.parallel.tiles or is_by_head


@TILE_RULES.rule(
    "heads inside exchanges have shares of key/value heads",
    (TILES, "model.attention.kv_heads", "parallel.cp"),
    why="ranks that share a key/value head would compute it several times",
    fix=lambda c: without(c, HEADS),
)
def exchanged_heads_have_shares(c: ConfigOnRanks) -> bool:
    return HEADS not in c.parallel.tiles or c.model.attention.kv_heads % c.parallel.cp == 0


def recompute_without_swap(c: ConfigOnRanks) -> str:
    others = [entry for entry in without_presets(c.memory.recompute) if entry.partition("@")[0] != "swap"]
    return f"set memory.recompute to {format_value(tuple(others)) or NONE}"


@TILE_RULES.rule(
    "heads inside exchanges are swapped once",
    (TILES, "memory.recompute", "model.layers", "model.mtp"),
    why="heads arrive inside the projection back, which keeps them; there is no swap of its own to run again",
    fix=recompute_without_swap,
)
def exchanged_heads_are_swapped_once(c: ConfigOnRanks) -> bool:
    return HEADS not in c.parallel.tiles or "swap" not in recomputed_regions(c)


@TILE_RULES.rule(
    "projections inside exchanges are plain",
    (TILES, "precision.recipe", "precision.recipes", "precision.tp_sums", "precision.tp_sum_gradients"),
    why="their kernels multiply and send train.precision, and no recipe is asked for operands",
    fix=without_projections,
)
def exchanged_projections_are_plain(c: ConfigOnRanks) -> bool:
    quantises = any(spec.quantises for spec in recipes_in_use(c))
    sends_plain = c.precision.tp_sums == c.precision.tp_sum_gradients == "plain"
    return not exchanges_in_projections(c) or (sends_plain and not quantises)


@TILE_RULES.rule(
    "projections inside exchanges have no adapters",
    (TILES, "lora.rank"),
    why="the output of an adapter is added to the product of all rows, which the exchange does not make apart",
    fix=without_projections,
)
def exchanged_projections_have_no_adapters(c: ConfigOnRanks) -> bool:
    return not exchanges_in_projections(c) or c.lora.rank == 0


@TILE_RULES.rule(
    "projections inside exchanges are of one pass at a time",
    (TILES, "pipeline.pair", "pipeline.schedule"),
    why="two passes of a slot run on two lanes, and ranks could issue their exchanges in different orders",
    fix="set pipeline.pair to false and pipeline.schedule to zb_v",
)
def exchanged_projections_are_of_one_pass(c: ConfigOnRanks) -> bool:
    return not exchanges_in_projections(c) or not has_pairs(c)


@TILE_RULES.rule(
    "projections inside exchanges are not invariant",
    (TILES, "kernels.invariant"),
    why="invariant products have kernels of their own, in tiles of 64 rows that do not wait for others",
    fix="set kernels.invariant to false",
)
def exchanged_projections_are_not_invariant(c: ConfigOnRanks) -> bool:
    return not exchanges_in_projections(c) or not c.kernels.invariant


@TILE_RULES.rule(
    "projections inside exchanges have one number of rows",
    (TILES, "parallel.context_sizes"),
    why="rooms are for the rows of a microbatch, which dynamic context changes from one to the next",
    fix="set parallel.context_sizes to fixed",
)
def exchanged_projections_have_one_number_of_rows(c: ConfigOnRanks) -> bool:
    return not exchanges_in_projections(c) or c.parallel.context_sizes == "fixed"


@TILE_RULES.rule(
    "projections inside exchanges are launched by the host",
    (TILES, "memory.graphs"),
    why="such exchanges were never captured",
    fix="set memory.graphs to none",
)
def exchanged_projections_are_launched(c: ConfigOnRanks) -> bool:
    return not exchanges_in_projections(c) or c.memory.graphs == "none"


@TILE_RULES.rule(
    "projections inside exchanges of GPUs are of bf16",
    (TILES, "train.device", "train.precision"),
    why="the kernels that wait for rows multiply bf16 on GPUs",
    fix="set train.precision to bf16",
)
def exchanged_projections_of_gpus_are_of_bf16(c: ConfigOnRanks) -> bool:
    on_gpu = c.train.device == "cuda"
    return not (exchanges_in_projections(c) and on_gpu) or c.train.precision in ("auto", "bf16")
