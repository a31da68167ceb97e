"""The third table of `moefold bench attention`: whole rings of 2 to 4 ranks, played by one process.

The blocks of all ranks are computed one after the other on one device, as ranks compute them: chunks in zig-zag order,
blocks that no query sees left out, each merged into earlier ones and its gradients added. Nothing is sent. The time is
that of all blocks, forward and backward, by their kernels on a GPU and by the clock on a CPU; the rate counts pairs of
a query and a key that it sees, and is compared with that of attention over the whole sequence with the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from moefold.bench.clock import busy_milliseconds, median_seconds
from moefold.bench.machine import cuda_capability
from moefold.bench.report import Row, add_number_columns, report_table
from moefold.bench.ring_blocks import MEAN_DOCUMENT, BlockMask, document_begins
from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import AttentionShape, Facts
from moefold.layout.axes import Axis
from moefold.layout.dtypes import DTYPES
from moefold.model.attention.context_parallel import RingSetting, begins_from_chunks, blocks_seen, log_sums_before_keys
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
Work = Callable[[], object]


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


class OwnedBlock(NamedTuple):
    """Whose keys, queries, keys, how far ahead, and where documents begin."""

    owner: int
    mine: slice
    theirs: slice
    ahead: int
    begins: Tensor | None


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
        window = self.mask.window
        return RingSetting(self.scale, window, cp, self.kernels, watch=None)

    def positions(self) -> Tensor:
        q = self.heads.q
        length = q.shape[1]
        return zigzag_positions(length, self.ranks, q.device)

    def shares(self) -> list[Heads]:
        """What each rank holds."""
        of_ranks = self.positions()
        return [self.heads.held(positions) for positions in of_ranks]

    def play(self) -> list[Gradients]:
        """Forward and backward of all ranks; gradients as the ranks hold them."""
        shares = self.shares()
        outcomes: list[Outcome] = []
        for rank in range(self.ranks):
            outcome = self.forward(shares, rank)
            outcomes.append(outcome)
        return self.backward(shares, outcomes)

    def blocks(self, shares: list[Heads], rank: int) -> Iterator[OwnedBlock]:
        setting = self.place(rank)
        q = shares[rank].q
        begins = begins_from_chunks(self.mask.begins_BS, setting.cp)
        for hop in range(self.ranks):
            owner = (rank - hop) % self.ranks
            for seen in blocks_seen(q, begins, owner, setting):
                yield OwnedBlock(owner, *seen)

    def forward(self, shares: list[Heads], rank: int) -> Outcome:
        attend = self.kernels[attention_block]
        q, _, v, _ = shares[rank]
        wide = torch.promote_types(q.dtype, torch.float32)
        by_head = q.shape[:-1]
        value_width = v.shape[-1]
        shape = (*by_head, value_width)
        out = q.new_empty(shape, dtype=wide)
        lse = log_sums_before_keys(q, None, wide)
        for block in self.blocks(shares, rank):
            mine = block.mine
            keys, values = keys_and_values(shares, block)
            out_part = out[:, mine]
            lse_part = lse[..., mine]
            q_part = q[:, mine]
            setting = self.setting_of(block)
            attend(out_part, lse_part, q_part, keys, values, self.scale, *setting)
        y = out.to(q.dtype)
        return Outcome(y, lse)

    def setting_of(self, block: OwnedBlock) -> tuple[int, int, Tensor | None, bool]:
        """How far ahead, the window, begins of documents, and whether the block is fresh."""
        ahead = block.ahead
        return ahead, self.mask.window, block.begins, ahead == 0

    def backward(self, shares: list[Heads], outcomes: list[Outcome]) -> list[Gradients]:
        """Sums are in fp32, as those that travel."""
        add_gradients = self.kernels[attention_block_backward]
        wide = outcomes[0].lse.dtype
        sums = [gradient_sums(share, wide) for share in shares]
        for rank, (y, lse) in enumerate(outcomes):
            q, _, _, dy = shares[rank]
            dq, _, _ = sums[rank]
            delta = torch.empty_like(lse)
            for block in self.blocks(shares, rank):
                mine = block.mine
                _, dk, dv = sums[block.owner]
                theirs = block.theirs
                dq_part = dq[:, mine]
                dk_part = dk[:, theirs]
                dv_part = dv[:, theirs]
                delta_part = delta[..., mine]
                of_block = (dq_part, dk_part, dv_part, delta_part)
                dy_part = dy[:, mine]
                q_part = q[:, mine]
                keys, values = keys_and_values(shares, block)
                heads = (dy_part, q_part, keys, values)
                y_part = y[:, mine]
                lse_part = lse[..., mine]
                setting = self.setting_of(block)
                add_gradients(*of_block, *heads, y_part, lse_part, self.scale, *setting)
        return sums


def keys_and_values(shares: list[Heads], block: OwnedBlock) -> tuple[Tensor, Tensor]:
    owner = shares[block.owner]
    keys = owner.k[:, block.theirs]
    values = owner.v[:, block.theirs]
    return keys, values


def gradient_sums(share: Heads, dtype: torch.dtype) -> Gradients:
    """Empty memory for that of queries, which the first block of each chunk writes, and zeros."""
    dq = torch.empty_like(share.q, dtype=dtype)
    dk = torch.zeros_like(share.k, dtype=dtype)
    dv = torch.zeros_like(share.v, dtype=dtype)
    return dq, dk, dv


def played_ring_rows(device: str) -> list[Row]:
    """For each mask: the whole sequence, and rings of each size."""
    shape = PLAYED_SHAPES[device]
    precision = PRECISIONS[device]
    capability = cuda_capability(device)
    facts = Facts(device, precision, capability, attention=shape)
    heads = random_heads(shape, facts)
    rows: list[Row] = []
    masks = played_masks(shape, device)
    for name, mask in masks.items():
        is_plain = mask.begins_BS is None and not mask.window
        kernels = BoundKernels(replace(facts, sees_all=is_plain))
        pairs = visible_pairs(mask, heads)
        flops = PRODUCTS * 2 * pairs * shape.heads * shape.head_dim
        work = whole_sequence(heads, mask, kernels)
        whole = timed(work, device)
        row = played_row(name, "whole", whole, flops)
        rows.append(row)
        for ranks in RING_SIZES:
            ring = PlayedRing(heads, mask, ranks, kernels)
            milliseconds = timed(ring.play, device)
            row = played_row(name, f"{ranks} ranks", milliseconds, flops)
            row["of whole"] = whole / milliseconds
            rows.append(row)
    return rows


def random_heads(shape: AttentionShape, facts: Facts, sequences: int = 1) -> Heads:
    device = facts.device
    dtype = DTYPES[facts.dtype]
    generator = torch.Generator(device)
    generator.manual_seed(0)

    def drawn(heads: int, width: int) -> Tensor:
        size = (sequences, shape.length, heads, width)
        x = torch.randn(size, device=device, generator=generator)
        return x.to(dtype)

    q = drawn(shape.heads, shape.head_dim)
    k = drawn(shape.kv_heads, shape.head_dim)
    v = drawn(shape.kv_heads, shape.value_dim)
    dy = drawn(shape.heads, shape.value_dim)
    return Heads(q, k, v, dy)


def played_masks(shape: AttentionShape, device: str) -> dict[str, BlockMask]:
    begins = document_begins(1, shape.length)
    begins = begins.to(device)
    window = WINDOWS[device]
    return {
        "causal": BlockMask(0),
        f"documents of about {MEAN_DOCUMENT}": BlockMask(0, 0, begins),
        f"window {window}": BlockMask(0, window),
    }


def visible_pairs(mask: BlockMask, heads: Heads) -> float:
    q = heads.q
    length = q.shape[1]
    share = mask.visible_share(q)
    return share * length**2


def whole_sequence(heads: Heads, mask: BlockMask, kernels: BoundKernels) -> Callable[[], Gradients]:
    """Attention of one rank, by the kernel that a run takes."""
    q, k, v, dy = map(Tensor.detach, heads)
    inputs = (q, k, v)
    for x in inputs:
        x.requires_grad_()
    scale = q.shape[-1] ** -0.5
    attend = kernels[attention]

    def forward_and_backward() -> Gradients:
        y = attend(q, k, v, scale, mask.window, None, mask.begins_BS)
        return torch.autograd.grad(y, inputs, dy)  # pyright: ignore[reportReturnType]

    return forward_and_backward


def timed(work: Work, device: str) -> float:
    """Milliseconds: on a GPU those in which kernels ran, behind a call to warm up; on a CPU those of the clock."""
    if device == "cuda":
        work()
        return busy_milliseconds(work, torch.device(device))
    return median_seconds(work, device, CPU_RUNS) * 1e3


def played_row(mask: str, ring: str, milliseconds: float, flops: float) -> Row:
    teraflops = flops / milliseconds / 1e9
    return {
        "mask": mask,
        "ring": ring,
        "milliseconds": milliseconds,
        "teraflops": teraflops,
    }


def played_ring_table(rows: list[Row]) -> Table:
    title = "Rings played by one process: all blocks of all ranks, forward, merge and backward"
    table = report_table(title, "mask", "ring")
    add_number_columns(table, "ms", "TF/s", "of the plain kernel's rate")
    for row in rows:
        milliseconds = f"{row['milliseconds']:.2f}"
        teraflops = f"{row['teraflops']:.3g}"
        share = ""
        if "of whole" in row:
            share = f"{row['of whole']:.2f}"
        table.add_row(row["mask"], row["ring"], milliseconds, teraflops, share)
    return table
