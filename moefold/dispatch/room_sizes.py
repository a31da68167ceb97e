"""Rows and bytes of the rooms of the symmetric dispatcher, and of those of dense products inside exchanges, from a
configuration. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from moefold.anatomy.announced_choices import blocks_of_tokens, columns_of_counts
from moefold.anatomy.step_specs import dispatched_width
from moefold.comm.part_sizes import WORD_BYTES, PartSizes, aligned_bytes
from moefold.config.run import Config, MoeConfig

COUNT_BYTES = 4
MIB = 2**20


class ArenaRows(NamedTuple):
    """Bounds that the host knows: `tokens` that a rank sends at most, `arriving` that a room has rows for, and
    `choices` of a rank's experts that there are rows for; None: as many as come with these tokens."""

    tokens: int
    arriving: int
    choices: int | None = None


def arena_rows(tokens: int, senders: int, most_rows: int) -> ArenaRows:
    """Bounds for `most_rows` of a rank; 0: for all that can come."""
    all_tokens = tokens * senders
    if not most_rows:
        return ArenaRows(tokens, all_tokens)
    arriving = min(all_tokens, most_rows)
    return ArenaRows(tokens, arriving, most_rows)


def tokens_per_rank(config: Config) -> int:
    """Tokens of a microbatch that one rank dispatches."""
    parallel = config.parallel
    tokens = config.train.micro_batch * config.data.seq_len
    ranks = parallel.cp * parallel.tp
    return tokens // ranks


def tokens_per_exchange(config: Config) -> int:
    """Tokens that one rank dispatches at a time: those of a microbatch, or of its largest row chunk."""
    return -(-tokens_per_rank(config) // config.parallel.row_chunks)


def bounded_rows(config: Config) -> int:
    """Rows of its experts that a rank has room for with `parallel.room`. The mean of a token's experts is top_k, also
    where experts choose tokens and all of them may choose the same."""
    parallel = config.parallel
    choices = tokens_per_exchange(config) * config.model.moe.top_k
    mean = choices * parallel.etp
    return math.ceil(mean * parallel.room)


def most_choices(moe: MoeConfig) -> int:
    """Experts of a token at most: those it chooses, or all that may choose it."""
    return moe.experts if moe.router.kind == "expert_choice" else moe.top_k


def kept_rooms(config: Config) -> int:
    """Rooms in which arrived tokens stay until nobody reads them. A room is free for what is launched behind its last
    reader on the same stream, so there is none where layers run on two lanes, and none that tiles read."""
    parallel = config.parallel
    has_two_lanes = config.pipeline.pair or parallel.row_chunks > 1
    copies = has_two_lanes or "experts" in parallel.tiles
    return 0 if copies else parallel.kept_rooms


def row_bytes_at_most(row_width: int, itemsize: int, k: int) -> int:
    """Bytes of the longest row that is sent: a token of a model, in fp64 a number, or gradients of router weights."""
    token = max(row_width, 1) * itemsize
    fp8_token = row_width + WORD_BYTES * (row_width // 128 + 1)
    weights = k * WORD_BYTES
    return max(token, fp8_token, weights)


class AnnouncedSizes(NamedTuple):
    """What the choices of all ranks depend on."""

    senders: int
    tokens: int
    choices: int
    experts: int
    ranks: int

    @property
    def all_choices(self) -> int:
        return self.senders * self.tokens * self.choices

    @property
    def all_counts(self) -> int:
        columns = columns_of_counts(self.experts, self.ranks)
        return self.senders * blocks_of_tokens(self.tokens) * columns

    @property
    def bytes(self) -> int:
        """Bytes of places, of weights of the widest type, and of counts."""
        places = aligned_bytes(self.all_choices * COUNT_BYTES)
        weights = aligned_bytes(self.all_choices * WORD_BYTES)
        return places + weights + self.all_counts * COUNT_BYTES


def room_bytes(rows: ArenaRows, announced: AnnouncedSizes, row_bytes: int) -> int:
    """Bytes of a room: of the tokens that may arrive, or of the choices of all ranks."""
    tokens = (rows.arriving + 1) * row_bytes
    return max(tokens, announced.bytes)


def arena_bytes(config: Config, bytes_each: int) -> int:
    """Bytes of all rooms of a rank."""
    parallel = config.parallel
    moe = config.model.moe
    senders = parallel.ep * parallel.etp
    choices = most_choices(moe)
    rows = arena_rows(tokens_per_exchange(config), senders, bounded_rows(config))
    row_bytes = row_bytes_at_most(dispatched_width(config.model), bytes_each, choices)
    announced = AnnouncedSizes(senders, rows.tokens, choices, moe.experts, parallel.ep)
    size = room_bytes(rows, announced, row_bytes)
    sizes = PartSizes(senders, size, kept_rooms(config))
    return sizes.total


def room_in_words(config: Config, bytes_each: int) -> str:
    """What the symmetric dispatcher has room for on a rank, in words."""
    parallel = config.parallel
    ranks = parallel.ep * parallel.etp
    tokens = tokens_per_exchange(config) * ranks
    room = f"room for all {tokens} tokens of {ranks} ranks"
    if parallel.room:
        rows = bounded_rows(config)
        room = f"room for {rows} rows, {parallel.room:g} x the mean; a step with more is run again by dedup"
    size = arena_bytes(config, bytes_each) / MIB
    return f"{room}; {kept_in_words(config)}; {size:,.1f} MiB of rooms"


def kept_in_words(config: Config) -> str:
    kept = kept_rooms(config)
    if not kept:
        return "arrived tokens are copied from there"
    return f"arrived tokens of {kept} layers and microbatches at a time are read where they lie, others are copied"


# Dense products inside exchanges.

LEAST_ROWS, LEAST_COLUMNS = 128, 64  # of a tile


def flags_of_sender(rows: int, width: int) -> int:
    """Tiles of a rank's rows at most: each has a flag of every sender."""
    return -(-rows // LEAST_ROWS) * -(-width // LEAST_COLUMNS)


def flags_of_heads(rows: int, shares: Sequence[int]) -> int:
    """Tiles of a rank's rows at most, with columns of one rank's heads in each layer."""
    return sum(flags_of_sender(rows, share) for share in shares)


class ProductRoom(NamedTuple):
    """What an arena of ranks has room for: `rows` of a rank, of this width and so many bytes a number. `flags`: of one
    sender."""

    ranks: int
    rows: int
    width: int
    number_bytes: int
    flags: int

    @property
    def room_bytes(self) -> int:
        return self.ranks * self.rows * self.width * self.number_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of a rank: both rooms, and where kernels signal a word for each flag of every sender."""
        words = self.ranks * (1 + self.flags)
        sizes = PartSizes(words, self.room_bytes)
        return sizes.total


def projection_room(config: Config, bytes_each: int) -> ProductRoom:
    """For the tokens of a microbatch, of all tp ranks, as wide as the residual stream."""
    rows = tokens_per_rank(config)
    width = config.model.hidden
    return ProductRoom(config.parallel.tp, rows, width, bytes_each, flags_of_sender(rows, width))


def head_room(config: Config, bytes_each: int) -> ProductRoom:
    """For the tokens of a microbatch, of all cp ranks, as wide as queries, keys and values of one rank's heads."""
    attention = config.model.attention
    ranks = config.parallel.cp
    rows = tokens_per_rank(config)
    heads = (attention.heads, attention.kv_heads, attention.kv_heads)
    shares = [count * attention.head_dim // ranks for count in heads]
    return ProductRoom(ranks, rows, sum(shares), bytes_each, flags_of_heads(rows, shares))
