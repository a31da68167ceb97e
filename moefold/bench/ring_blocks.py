"""The second table of `moefold bench attention`: blocks of ring attention beside attention over whole sequences.

A block is timed with its merge into earlier blocks, forward and backward. Its rate is compared with that of whole
sequences of as many positions, by the kernels that repeat to the bit.
"""

from __future__ import annotations

from rich.table import Table
from torch import Tensor

from moefold.bench.machine import cuda_capability
from moefold.bench.report import Row
from moefold.kernels.attention.autotune import forward_and_backward, median_milliseconds, random_inputs
from moefold.kernels.attention.choices import BLOCK_CHOICES
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward, merge_attention_block
from moefold.kernels.facts import AttentionShape, Facts
from moefold.layout.dtypes import DTYPES

BLOCK_SHAPE = AttentionShape(4096, heads=32, kv_heads=4, head_dim=128, value_dim=128)
PRODUCTS = 7  # two of forward and five of backward, each 2 S L D operations for every head
WHOLE = "whole sequences"


def ring_block_rows(device: str) -> list[Row]:
    """Milliseconds and TF/s of whole sequences, of blocks on the diagonal and of wholly visible blocks."""
    capability = cuda_capability(device)
    facts = Facts(device, "bf16", capability, attention=BLOCK_SHAPE)
    dtype = DTYPES[facts.dtype]
    q, k, v, dy = random_inputs(BLOCK_SHAPE, dtype)
    attend = forward_and_backward("deterministic", q, k, v, dy)
    whole = median_milliseconds(attend)
    first = timed_row(WHOLE, "deterministic", whole, causal=True, batch=len(q))
    rows = [first]
    inputs = [x.detach() for x in (q, k, v, dy)]
    for choice in BLOCK_CHOICES:
        if choice.when(facts):
            rows += rows_of_kernel(choice.name, inputs)
    return rows


def rows_of_kernel(kernel: str, inputs: list[Tensor]) -> list[Row]:
    batch = len(inputs[0])
    diagonal = block_milliseconds(kernel, inputs, ahead=0)
    visible = block_milliseconds(kernel, inputs, ahead=BLOCK_SHAPE.length)
    return [
        timed_row("on the diagonal", kernel, diagonal, causal=True, batch=batch),
        timed_row("wholly visible", kernel, visible, causal=False, batch=batch),
    ]


def block_milliseconds(kernel: str, inputs: list[Tensor], ahead: int) -> float:
    q, k, v, dy = inputs
    attend = attention_block.implementations[kernel]
    attend_backward = attention_block_backward.implementations[kernel]
    merge = merge_attention_block.implementations["triton"]
    scale = q.shape[-1] ** -0.5
    result, lse = attend(q, k, v, scale, ahead, 0)
    out = result.float()
    products = dy.float() * out
    delta = products.sum(-1).transpose(1, 2)
    delta = delta.contiguous()
    merged_lse = lse.clone()

    def forward_merge_backward() -> None:
        part, part_lse = attend(q, k, v, scale, ahead, 0)
        merge(out, merged_lse, part, part_lse)
        attend_backward(dy, q, k, v, lse, delta, scale, ahead, 0)

    return median_milliseconds(forward_merge_backward)


def timed_row(block: str, kernel: str, milliseconds: float, causal: bool, batch: int) -> Row:
    shape = BLOCK_SHAPE
    pairs = batch * shape.length**2 * shape.heads
    operations = PRODUCTS * 2 * pairs * shape.head_dim
    if causal:
        operations /= 2
    teraflops = operations / milliseconds / 1e9
    return {"block": block, "kernel": kernel, "milliseconds": milliseconds, "teraflops": teraflops}


def ring_block_table(rows: list[Row]) -> Table:
    title = f"Blocks of ring attention, {BLOCK_SHAPE}: forward, merge and backward"
    table = Table("block", "kernel", title=title, title_justify="left")
    for column in ("ms", "TF/s", "of whole sequences"):
        table.add_column(column, justify="right")
    whole = rows[0]["teraflops"]
    for row in rows:
        share = row["teraflops"] / whole
        cells = f"{row['milliseconds']:.2f}", f"{row['teraflops']:.0f}", f"{share:.2f}"
        block = row["block"]
        table.add_row(block, row["kernel"], *cells)
    return table
