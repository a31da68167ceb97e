"""The second table of `moefold bench attention`: blocks of ring attention beside attention over whole sequences.

A block, which is not the first, is timed with its merge into earlier blocks, forward and backward. Its rate is compared
with that of whole sequences of as many positions, by the kernels that repeat to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from moefold.bench.machine import cuda_capability
from moefold.bench.report import Row, report_table
from moefold.kernels.attention.autotune import forward_and_backward, median_milliseconds, random_inputs
from moefold.kernels.attention.choices import BLOCK_CHOICES
from moefold.kernels.attention.masked import first_visible_key
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward, begins_among_keys
from moefold.kernels.facts import AttentionShape, Facts
from moefold.layout.dtypes import DTYPES

BLOCK_SHAPE = AttentionShape(4096, heads=32, kv_heads=4, head_dim=128, value_dim=128)
PRODUCTS = 7  # two of forward and five of backward, each 2 S L D operations for every head
WHOLE = "whole sequences"
MEAN_DOCUMENT = 700  # tokens


class BlockInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor


class BlockMask(NamedTuple):
    """How far queries stand ahead of keys, the window, and where documents begin, counted from the first query."""

    ahead: int
    window: int = 0
    begins_BS: Tensor | None = None

    def visible_share(self, q_BSHD: Tensor) -> float:
        """Pairs of a query and a key that it sees, over all pairs of a block."""
        begins_BS = begins_among_keys(self.begins_BS, self.ahead)
        first_BS = first_visible_key(q_BSHD, self.ahead, self.window, begins_BS)
        queries = q_BSHD.shape[1]
        keys = queries
        own_S = torch.arange(queries, device=q_BSHD.device) + self.ahead
        last_S = own_S.clamp(max=keys - 1)
        seen_BS = last_S - first_BS + 1
        seen = seen_BS.clamp(min=0).double()
        return seen.mean().item() / keys


def ring_block_rows(device: str) -> list[Row]:
    """Milliseconds and TF/s of whole sequences, and of blocks: on the diagonal, wholly visible, with documents, and at
    the end of a window."""
    capability = cuda_capability(device)
    facts = Facts(device, "bf16", capability, attention=BLOCK_SHAPE)
    dtype = DTYPES[facts.dtype]
    q, k, v, dy = random_inputs(BLOCK_SHAPE, dtype)
    attend = forward_and_backward("deterministic", q, k, v, dy)
    whole = median_milliseconds(attend)
    flops = flops_of_all_pairs(batch=len(q))
    first = timed_row(WHOLE, "deterministic", whole, flops / 2)
    rows = [first]
    inputs = BlockInputs(*map(Tensor.detach, (q, k, v, dy)))
    masks = block_masks(inputs)
    for choice in BLOCK_CHOICES:
        if choice.when(facts):
            rows += rows_of_kernel(choice.name, inputs, masks)
    return rows


def block_masks(inputs: BlockInputs) -> dict[str, BlockMask]:
    sequences, length, _, _ = inputs.q.shape
    begins = document_begins(sequences, length).to(inputs.q.device)
    return {
        "on the diagonal": BlockMask(0),
        "wholly visible": BlockMask(length),
        f"documents of about {MEAN_DOCUMENT}": BlockMask(0, 0, begins),
        f"window {length}, half of the block": BlockMask(length, length),
    }


def document_begins(sequences: int, length: int) -> Tensor:
    """The first position of each position's document, of random lengths."""
    generator = torch.Generator()
    generator.manual_seed(0)
    starts = torch.rand(sequences, length, generator=generator) < 1 / MEAN_DOCUMENT
    position = torch.arange(length)
    start_or_zero = torch.where(starts, position, 0)
    return start_or_zero.cummax(1).values.int()


def rows_of_kernel(kernel: str, inputs: BlockInputs, masks: dict[str, BlockMask]) -> list[Row]:
    flops = flops_of_all_pairs(batch=len(inputs.q))
    rows: list[Row] = []
    for name, mask in masks.items():
        milliseconds = block_milliseconds(kernel, inputs, mask)
        share = mask.visible_share(inputs.q)
        rows.append(timed_row(name, kernel, milliseconds, flops * share))
    return rows


def block_milliseconds(kernel: str, inputs: BlockInputs, mask: BlockMask) -> float:
    q, k, v, dy = inputs
    attend = attention_block.implementations[kernel]
    add_gradients = attention_block_backward.implementations[kernel]
    scale = q.shape[-1] ** -0.5
    out = dy.float()
    b, s, h, _ = q.shape
    lse = q.new_zeros(b, h, s, dtype=torch.float32)
    delta = torch.zeros_like(lse)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))

    def both_passes() -> None:
        attend(out, lse, q, k, v, scale, *mask, fresh=False)
        add_gradients(dq, dk, dv, delta, dy, q, k, v, dy, lse, scale, *mask, fresh=False)

    return median_milliseconds(both_passes)


def flops_of_all_pairs(batch: int) -> float:
    """Operations where every query sees every key; causal attention has half of them."""
    shape = BLOCK_SHAPE
    pairs = batch * shape.length**2 * shape.heads
    return PRODUCTS * 2 * pairs * shape.head_dim


def timed_row(block: str, kernel: str, milliseconds: float, flops: float) -> Row:
    return {
        "block": block,
        "kernel": kernel,
        "milliseconds": milliseconds,
        "teraflops": flops / milliseconds / 1e9,
    }


def ring_block_table(rows: list[Row]) -> Table:
    title = f"Blocks of ring attention, {BLOCK_SHAPE}: forward, merge and backward"
    table = report_table(title, "block", "kernel")
    for column in ("ms", "TF/s", "of whole sequences"):
        table.add_column(column, justify="right")
    whole = rows[0]["teraflops"]
    for row in rows:
        share = row["teraflops"] / whole
        block = row["block"]
        kernel = row["kernel"]
        times = f"{row['milliseconds']:.2f}"
        rate = f"{row['teraflops']:.0f}"
        table.add_row(block, kernel, times, rate, f"{share:.2f}")
    return table
