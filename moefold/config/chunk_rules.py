"""Rules of row chunks (`parallel.row_chunks`): what they need, and what does not know of them yet."""

from __future__ import annotations

from moefold.config.memory_rules import recomputed_regions
from moefold.config.rule import ConfigOnRanks, RuleList

CHUNKS = "parallel.row_chunks"
WITHOUT_CHUNKS = "set parallel.row_chunks to 1"
WHOLE_LAYERS = {"moe", "layer"}

CHUNK_RULES = RuleList()


def has_row_chunks(c: ConfigOnRanks) -> bool:
    return c.parallel.row_chunks > 1


@CHUNK_RULES.rule(
    "row chunks are sent",
    (CHUNKS, "parallel.ep", "parallel.etp"),
    why="a rank that holds all experts sends nothing that chunks could overlap",
    fix=WITHOUT_CHUNKS,
)
def row_chunks_are_sent(c: ConfigOnRanks) -> bool:
    return not has_row_chunks(c) or c.parallel.ep * c.parallel.etp > 1


@CHUNK_RULES.rule(
    "layers in row chunks are not recomputed as one",
    (CHUNKS, "memory.recompute", "model.layers", "model.mtp"),
    why="regions moe and layer run a layer's steps as one, beside which nothing of the layer can run",
    fix="set memory.recompute to sar",
)
def chunked_layers_are_not_one_region(c: ConfigOnRanks) -> bool:
    return not has_row_chunks(c) or WHOLE_LAYERS.isdisjoint(recomputed_regions(c))


@CHUNK_RULES.rule(
    "row chunks have no clones",
    (CHUNKS, "parallel.clone_slots"),
    why="clones are sent for all rows of a microbatch at once",
    fix="set parallel.clone_slots to 0",
)
def row_chunks_have_no_clones(c: ConfigOnRanks) -> bool:
    return not has_row_chunks(c) or c.parallel.clone_slots == 0


@CHUNK_RULES.rule(
    "row chunks are not stashed",
    (CHUNKS, "memory.stash"),
    why="a stash gives back the rows of a layer in the order of its microbatches, and chunks go backward in another",
    fix="set memory.stash to none",
)
def row_chunks_are_not_stashed(c: ConfigOnRanks) -> bool:
    return not has_row_chunks(c) or c.memory.stash == "none"


@CHUNK_RULES.rule(
    "row chunks are not padded to capacity",
    (CHUNKS, "model.moe.capacity.pad"),
    why="capacity is that of all tokens of a rank, and all that an expert may take may lie in one chunk",
    fix="set model.moe.capacity.pad to false",
)
def row_chunks_are_not_padded(c: ConfigOnRanks) -> bool:
    return not has_row_chunks(c) or not c.model.moe.capacity.pad


@CHUNK_RULES.rule(
    "gradients of all row chunks are there before an update",
    (CHUNKS, "optim.when"),
    why="each chunk adds to the gradients of its layer's experts, which an update in backward would free behind the "
    "first",
    fix="set optim.when to step",
)
def chunk_gradients_are_there_before_an_update(c: ConfigOnRanks) -> bool:
    return not has_row_chunks(c) or c.optim.when == "step"


@CHUNK_RULES.rule(
    "row chunks are begun by the host",
    (CHUNKS, "memory.graphs"),
    why="steps of chunks stand between those that a graph would join",
    fix="set memory.graphs to none",
)
def row_chunks_are_begun_by_the_host(c: ConfigOnRanks) -> bool:
    return not has_row_chunks(c) or c.memory.graphs == "none"
