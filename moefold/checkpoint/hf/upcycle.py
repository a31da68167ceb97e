"""A dense model becomes one with experts that computes the same at first.

Plain, E8T2: every layer's MLP is copied 8 times, a token visits 2 copies, and their weights sum to one.
Granular, E8G2T2: the MLP is cut into 2 shards along its inner width, and each shard copied 8 times: 16 experts of half
the width. Shards of one copy share a row of the router, so that a token visits whole copies:

    expert           0        1        2        3     ...
    copy, shard     0, 0     0, 1     1, 0     1, 1            T = 2: the two shards of the copy it likes best
    router row       r0       r0       r1       r1
    gate, up, down  half 0   half 1   half 0   half 1          down x G

With T = m G a token visits m copies, the G shards of each with equal weights that sum to 1 / G of the copy's; down is
scaled by G to make up for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moefold.checkpoint.format.boxes import Range, box_slices
from moefold.checkpoint.hf.piece_values import FetchBox
from moefold.config.errors import UserError, printable_text
from moefold.config.run import BalanceConfig, ModelConfig, MoeConfig


@dataclass(frozen=True)
class UpcyclePlan:
    """E copies of an MLP that is cut into G shards; a token visits T of the E x G experts."""

    copies: int
    shards: int
    top: int


def parse_upcycle_plan(text: str, dense: ModelConfig) -> UpcyclePlan:
    """`E8T2` or `E8G2T2`, checked against the model that it is for."""
    found = re.fullmatch(r"E(\d{1,6})(?:G(\d{1,6}))?T(\d{1,6})", text)
    if not found:
        raise UserError(
            f'--upcycle "{printable_text(text)}" is not legal; expected copies, shards and choices, as E8T2 or E8G2T2'
        )
    plan = UpcyclePlan(int(found[1]), int(found[2] or 1), int(found[3]))
    if problem := upcycle_problem(plan, dense.dense_ffn):
        raise UserError(f"--upcycle {text}: {problem}")
    return plan


def upcycle_problem(plan: UpcyclePlan, width: int) -> str:
    """Why a token would not visit whole copies of an MLP of that width, or nothing."""
    experts = plan.copies * plan.shards
    if min(plan.copies, plan.shards, plan.top) < 1:
        return "expected numbers of at least 1"
    if plan.top % plan.shards:
        return f"T = {plan.top} is no multiple of G = {plan.shards}, so that tokens would visit parts of an MLP"
    if plan.top > experts:
        return f"T = {plan.top} is more than the {experts} experts"
    return f"G = {plan.shards} does not divide the MLP's width, {width}" if width % plan.shards else ""


def upcycled_model(dense: ModelConfig, plan: UpcyclePlan) -> ModelConfig:
    moe = MoeConfig(
        experts=plan.copies * plan.shards,
        top_k=plan.top,
        ffn=dense.dense_ffn // plan.shards,
        balance=BalanceConfig(aux_loss=0.001),
    )
    return replace(dense, moe=moe)


@dataclass(frozen=True)
class UpcycledWeights:
    """Gives boxes of the tensors of the model with experts, made of those of the dense one as they are asked for."""

    plan: UpcyclePlan
    dense: ModelConfig
    source: FetchBox
    seed: int

    def fetch_box(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        if name.endswith("moe.router.weight"):
            return self.router(name)[box_slices(box)]
        if ".moe.experts." not in name:
            return self.source(self.dense_source_name(name), box)
        stacked = torch.stack([self.source(self.dense_source_name(name), part) for part in self.parts(box)])
        return stacked.float() * self.plan.shards if name.endswith("down") else stacked  # rounded when it is written

    def dense_source_name(self, name: str) -> str:
        """The dense tensor that one is made of: blocks.0.moe.experts.down -> blocks.0.dense.down.weight. Routers are
        made of nothing, and are as norms are."""
        if name.endswith(("moe.norm.weight", "moe.router.weight")):
            return name.replace("moe.router", "moe.norm").replace("moe.norm", "dense.norm")
        return name.replace("moe.experts.", "dense.") + ".weight" if ".moe.experts." in name else name

    def parts(self, box: tuple[Range, ...]) -> Iterator[tuple[Range, ...]]:
        """For each expert of the box, the box of the dense tensor that it is made of. Behind the experts' dim, the
        second is the inner width, in both tensors."""
        (first, count), outer, (start, size), *rest = box
        width = self.dense.dense_ffn // self.plan.shards
        for expert in range(first, first + count):
            yield (outer, (expert % self.plan.shards * width + start, size), *rest)

    def router(self, name: str) -> torch.Tensor:
        """Random rows, one for each copy, repeated for its shards."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
        rows = torch.empty(self.plan.copies, self.dense.hidden, dtype=torch.float32, device="cpu")
        rows.normal_(0.0, self.dense.init_std, generator=generator)
        return rows.repeat_interleave(self.plan.shards, dim=0)
