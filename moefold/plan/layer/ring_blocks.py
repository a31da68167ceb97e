"""Temporaries of ring attention: keys and values that go round, and sums of all blocks in fp32. Where no kernel runs a
block (`kernels/attention/ring_block.py`), plain torch also builds the scores of whole chunks of queries and keys in
fp32, several copies of them at once.

`builds_ring_scores` asks the catalog of kernels for the implementation that a run would bind.
"""

from __future__ import annotations

from dataclasses import replace

from moefold.kernels.attention.backward_parts import plan_backward
from moefold.kernels.catalog import forced_implementations, pick_implementation
from moefold.kernels.facts import AttentionShape
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.layer.tensor_table import TensorTable, attended_width, context_tokens, one_column

RING_CONTEXTS = ("ring", "hierarchical")
RING_OPS = ("attention_block", "attention_block_backward")
FORWARD_BLOCKS = 3  # copies of a block that exist at once; a test counts them in the real op
BACKWARD_BLOCKS = 5


def chunk_length(s: RankShapes) -> float:
    """Positions of a chunk; each rank of the ring holds two, an early and a late one."""
    ring_ranks = s.portion.cp // s.ranks_swapping_heads
    return s.S / (2 * ring_ranks)


def block_attention_shape(s: RankShapes) -> AttentionShape:
    inside = s.ranks_swapping_heads
    length = int(chunk_length(s))
    heads = int(s.H) // inside
    kv_heads = int(s.G) * s.kv_copies // inside
    return AttentionShape(
        length=length,
        heads=heads,
        kv_heads=max(1, kv_heads),
        head_dim=int(s.Q),
        value_dim=int(s.V),
    )


def runs_ring(s: RankShapes) -> bool:
    if s.portion.context not in RING_CONTEXTS:
        return False
    return s.portion.cp > s.ranks_swapping_heads


def builds_ring_scores(s: RankShapes) -> bool:
    """Whether a run here has plain torch for the blocks of its ring."""
    if not runs_ring(s):
        return False
    return any(block_implementation(s, op) == "reference" for op in RING_OPS)


def block_implementation(s: RankShapes, op: str) -> str:
    """The one that a run here would bind."""
    has_sinks = s.model.attention.sinks
    sees_all = not s.window and not has_sinks
    shape = block_attention_shape(s)
    facts = replace(s.facts, attention=shape, sees_all=sees_all)
    forced = forced_implementations(s.portion.force)
    chosen, _ = pick_implementation(op, facts, forced.get(op))
    return chosen


def stores_block_gradients(s: RankShapes) -> bool:
    """Whether the backward of a block stores the gradients of its scores, as the kernels for Hopper do."""
    return runs_ring(s) and block_implementation(s, "attention_block_backward") == "hopper"


def block_gradient_bytes(s: RankShapes) -> float:
    """Of the gradients of a block's scores, wholly visible or on the diagonal."""
    shape = block_attention_shape(s)
    units = int(s.B) * shape.kv_heads
    group = shape.heads // shape.kv_heads
    sizes = (shape.length, units, group, shape.head_dim, shape.value_dim)
    plans = [plan_backward(*sizes, causal) for causal in (True, False)]
    return max(plan.workspace if plan else 0 for plan in plans)


def block_rows(s: RankShapes) -> float:
    """Rows of a block of scores: its queries, for every sequence and head."""
    heads = s.H / s.ranks_swapping_heads
    return s.B * heads * chunk_length(s)


def forward_block_width(s: RankShapes) -> float:
    return FORWARD_BLOCKS * chunk_length(s)


def backward_block_width(s: RankShapes) -> float:
    return BACKWARD_BLOCKS * chunk_length(s)


def round_width(s: RankShapes) -> float:
    """Keys and values of the block at hand and of the next."""
    return 2 * s.G * s.kv_copies * (s.Q + s.V)


def query_gradient_width(s: RankShapes) -> float:
    return s.H * s.Q


def add_ring_forward(table: TensorTable) -> None:
    ring = table.only(runs_ring)
    ring.add("keys and values that go round", context_tokens, round_width)
    ring.add("result of the ring so far, in fp32", context_tokens, attended_width, "fp32")
    plain = table.only(builds_ring_scores)
    plain.add("scores of a ring block, in fp32", block_rows, forward_block_width, "fp32")


def add_ring_backward(table: TensorTable) -> None:
    ring = table.only(runs_ring)
    ring.add("keys and values that go round", context_tokens, round_width)
    ring.add("their gradients, in fp32", context_tokens, round_width, "fp32")
    ring.add("gradient of queries, in fp32", context_tokens, query_gradient_width, "fp32")
    plain = table.only(builds_ring_scores)
    plain.add("scores of a ring block and their gradients, in fp32", block_rows, backward_block_width, "fp32")
    stored = table.only(stores_block_gradients)
    stored.add("gradients of the scores of a ring block", block_gradient_bytes, one_column, "byte")
