"""The third table of `moefold bench attention`: whole rings of 2 to 4 ranks, played by one process.

The blocks of all ranks are computed one after the other on one device, as ranks compute them: chunks in zig-zag order,
blocks that no query sees left out, each merged into earlier ones. Nothing is sent. The time is that of all blocks,
forward and backward, by events on a GPU and by the clock on a CPU; the rate counts pairs of a query and a key that it
sees, and is compared with that of attention over the whole sequence with the same mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from moefold.bench.machine import cuda_capability
from moefold.bench.report import Row, add_number_columns, report_table
from moefold.bench.ring_blocks import MEAN_DOCUMENT, BlockMask, document_begins
from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.autotune import median_milliseconds
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward, merge_attention_block
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import AttentionShape, Facts
from moefold.layout.axes import Axis
from moefold.layout.dtypes import DTYPES
from moefold.model.attention.context_parallel import RingSetting, begins_from_chunks, blocks_seen
from moefold.model.token_layout import zigzag_positions

PLAYED_SHAPES = {  # by device; on a CPU a smoke test
    "cuda": AttentionShape(32_768, heads=32, kv_heads=4, head_dim=128, value_dim=128),
    "cpu": AttentionShape(64, heads=2, kv_heads=1, head_dim=8, value_dim=8),
}
PRECISIONS = {"cuda": "bf16", "cpu": "fp32"}
RING_SIZES = (2, 4)
WINDOWS = {"cuda": 4096, "cpu": 24}
PRODUCTS = 7  # two of forward and five of backward
CPU_RUNS = 1

Gradients = tuple[Tensor, Tensor, Tensor]


class Heads(NamedTuple):
    """q, k, v and the gradient of the result: of a whole sequence, or of a rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor

    def held(self, positions: Tensor) -> Heads:
        parts = [x[:, positions] for x in self]
        return Heads(*parts)


class Outcome(NamedTuple):
    """Result and log-sum-exp of a rank's queries."""

    y: Tensor
    lse: Tensor


@dataclass(frozen=True)
class PlayedRing:
    """A ring of `ranks` ranks over one sequence, played by this process."""

    heads: Heads
    mask: BlockMask
    ranks: int
    kernels: BoundKernels

    @property
    def scale(self) -> float:
        return self.heads.q.shape[-1] ** -0.5

    def place(self, rank: int) -> RingSetting:
        every = tuple(range(self.ranks))
        cp = Axis("cp", every, rank)
        return RingSetting(self.scale, self.mask.window, cp, self.kernels, None)

    def positions(self) -> Tensor:
        length = self.heads.q.shape[1]
        return zigzag_positions(length, self.ranks, self.heads.q.device)

    def shares(self) -> list[Heads]:
        """What each rank holds."""
        return [self.heads.held(positions) for positions in self.positions()]

    def play(self) -> list[Gradients]:
        """Forward and backward of all ranks; gradients as the ranks hold them."""
        shares = self.shares()
        outcomes = [self.forward(shares, rank) for rank in range(self.ranks)]
        return self.backward(shares, outcomes)

    def blocks(self, shares: list[Heads], rank: int) -> Iterator[tuple[int, slice, slice, int, Tensor | None]]:
        """Whose keys, queries, keys, how far ahead, and where documents begin."""
        setting = self.place(rank)
        q = shares[rank].q
        begins = begins_from_chunks(self.mask.begins_BS, setting.cp)
        for hop in range(self.ranks):
            owner = (rank - hop) % self.ranks
            for seen in blocks_seen(q, begins, owner, setting):
                yield owner, *seen

    def forward(self, shares: list[Heads], rank: int) -> Outcome:
        q, _, v, _ = shares[rank]
        wide = torch.promote_types(q.dtype, torch.float32)
        b, s, h, _ = q.shape
        out = q.new_zeros((b, s, h, v.shape[-1]), dtype=wide)
        lse = q.new_full((b, h, s), -torch.inf, dtype=wide)
        for owner, mine, theirs, ahead, begins in self.blocks(shares, rank):
            keys, values = shares[owner].k[:, theirs], shares[owner].v[:, theirs]
            mask = (ahead, self.mask.window, begins)
            part = self.kernels[attention_block](q[:, mine], keys, values, self.scale, *mask)
            self.kernels[merge_attention_block](out[:, mine], lse[..., mine], *part)
        return Outcome(out, lse)

    def backward(self, shares: list[Heads], outcomes: list[Outcome]) -> list[Gradients]:
        """Sums are in fp32, as those that travel."""
        wide = outcomes[0].y.dtype
        sums = [[torch.zeros_like(x, dtype=wide) for x in (each.q, each.k, each.v)] for each in shares]
        for rank, (y, lse) in enumerate(outcomes):
            q, _, _, dy = shares[rank]
            delta = (dy.to(wide) * y).sum(-1).transpose(1, 2)
            for owner, mine, theirs, ahead, begins in self.blocks(shares, rank):
                keys, values = shares[owner].k[:, theirs], shares[owner].v[:, theirs]
                heads = (dy[:, mine], q[:, mine], keys, values)
                statistics = (lse[..., mine], delta[..., mine])
                mask = (ahead, self.mask.window, begins)
                parts = self.kernels[attention_block_backward](*heads, *statistics, self.scale, *mask)
                _, dk, dv = sums[owner]
                sums[rank][0][:, mine] += parts[0]
                dk[:, theirs] += parts[1]
                dv[:, theirs] += parts[2]
        return [(dq, dk, dv) for dq, dk, dv in sums]


def played_ring_rows(device: str) -> list[Row]:
    """For each mask: the whole sequence, and rings of each size."""
    shape = PLAYED_SHAPES[device]
    facts = Facts(device, PRECISIONS[device], cuda_capability(device), attention=shape)
    kernels = BoundKernels(facts)
    heads = random_heads(shape, facts)
    rows: list[Row] = []
    for name, mask in played_masks(shape, device).items():
        flops = PRODUCTS * 2 * visible_pairs(mask, heads) * shape.heads * shape.head_dim
        whole = timed(whole_sequence(heads, mask, kernels), device)
        rows.append(played_row(name, "whole", whole, flops))
        for ranks in RING_SIZES:
            ring = PlayedRing(heads, mask, ranks, kernels)
            milliseconds = timed(ring.play, device)
            row = played_row(name, f"{ranks} ranks", milliseconds, flops)
            rows.append(row | {"of whole": whole / milliseconds})
    return rows


def random_heads(shape: AttentionShape, facts: Facts, sequences: int = 1) -> Heads:
    generator = torch.Generator(facts.device)
    generator.manual_seed(0)

    def drawn(heads: int, width: int) -> Tensor:
        x = torch.randn((sequences, shape.length, heads, width), device=facts.device, generator=generator)
        return x.to(DTYPES[facts.dtype])

    q = drawn(shape.heads, shape.head_dim)
    k = drawn(shape.kv_heads, shape.head_dim)
    v = drawn(shape.kv_heads, shape.value_dim)
    return Heads(q, k, v, drawn(shape.heads, shape.value_dim))


def played_masks(shape: AttentionShape, device: str) -> dict[str, BlockMask]:
    begins = document_begins(1, shape.length).to(device)
    window = WINDOWS[device]
    return {
        "causal": BlockMask(0),
        f"documents of about {MEAN_DOCUMENT}": BlockMask(0, 0, begins),
        f"window {window}": BlockMask(0, window),
    }


def visible_pairs(mask: BlockMask, heads: Heads) -> float:
    length = heads.q.shape[1]
    return mask.visible_share(heads.q) * length**2


def whole_sequence(heads: Heads, mask: BlockMask, kernels: BoundKernels) -> Callable[[], Gradients]:
    """Attention of one rank, by the kernel that a run takes."""
    q, k, v = (x.detach().requires_grad_() for x in heads[:3])
    scale = q.shape[-1] ** -0.5

    def forward_and_backward() -> Gradients:
        y = kernels[attention](q, k, v, scale, mask.window, None, mask.begins_BS)
        return torch.autograd.grad(y, (q, k, v), heads.dy)  # pyright: ignore[reportReturnType]

    return forward_and_backward


def timed(work: Callable[[], object], device: str) -> float:
    """Milliseconds: the median of several runs."""
    if device == "cuda":
        return median_milliseconds(work)  # pyright: ignore[reportArgumentType]
    times: list[float] = []
    for _ in range(1 + CPU_RUNS):
        begun = time.perf_counter()
        work()
        times.append((time.perf_counter() - begun) * 1e3)
    return median(times[1:])


def played_row(mask: str, ring: str, milliseconds: float, flops: float) -> Row:
    return {"mask": mask, "ring": ring, "milliseconds": milliseconds, "teraflops": flops / milliseconds / 1e9}


def played_ring_table(rows: list[Row]) -> Table:
    title = "Rings played by one process: all blocks of all ranks, forward, merge and backward"
    table = report_table(title, "mask", "ring")
    add_number_columns(table, "ms", "TF/s", "of the plain kernel's rate")
    for row in rows:
        share = f"{row['of whole']:.2f}" if "of whole" in row else ""
        cells = (f"{row['milliseconds']:.2f}", f"{row['teraflops']:.3g}", share)
        table.add_row(row["mask"], row["ring"], *cells)
    return table
