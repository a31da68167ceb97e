"""Upcycling: a dense model becomes an MoE model that computes the same at first.

Plain, E8T2: the MLP of every layer is copied 8 times; a token is routed to 2 copies, whose weights sum to one.
Granular, E8G2T2: the MLP is cut into 2 shards along its inner width, and each shard copied 8 times: 16 experts of half
the width. Shards of one copy share a row of the router, so that a token is routed to whole copies:

    expert           0        1        2        3     ...
    copy, shard     0, 0     0, 1     1, 0     1, 1            T = 2: the two shards of the copy with the best score
    router row       r0       r0       r1       r1
    gate, up, down  half 0   half 1   half 0   half 1          down x G

With T = m G a token is routed to m copies. The G shards of a copy have equal routing weights, each 1 / G of the copy's:
down is scaled by G to compensate.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moefold.checkpoint.format.boxes import Box, box_slices
from moefold.checkpoint.hf.piece_values import FetchBox
from moefold.config.errors import UserError, printable_text
from moefold.config.run import BalanceConfig, ModelConfig, MoeConfig


@dataclass(frozen=True)
class UpcyclePlan:
    """E copies of an MLP that is cut into G shards; a token is routed to T of the E x G experts."""

    copies: int
    shards: int
    top: int


def parse_upcycle_plan(text: str, dense: ModelConfig) -> UpcyclePlan:
    """`E8T2` or `E8G2T2`, checked against the dense model."""
    match = re.fullmatch(r"E(\d{1,6})(?:G(\d{1,6}))?T(\d{1,6})", text)
    if not match:
        shown = printable_text(text)
        raise UserError(f'--upcycle "{shown}" is not legal; expected copies, shards and choices, as E8T2 or E8G2T2')
    copies, shards, top = match.groups(default="1")
    plan = UpcyclePlan(int(copies), int(shards), int(top))
    problem = upcycle_problem(plan, dense.dense_ffn)
    if problem:
        raise UserError(f"--upcycle {text}: {problem}")
    return plan


def upcycle_problem(plan: UpcyclePlan, width: int) -> str:
    """Why tokens would not be routed to whole copies of an MLP of that width; empty if they would."""
    experts = plan.copies * plan.shards
    least = min(plan.copies, plan.shards, plan.top)
    if least < 1:
        return "expected numbers of at least 1"
    if plan.top % plan.shards:
        return f"T = {plan.top} is no multiple of G = {plan.shards}, so that tokens would visit parts of an MLP"
    if plan.top > experts:
        return f"T = {plan.top} is more than the {experts} experts"
    if width % plan.shards:
        return f"G = {plan.shards} does not divide the MLP's width, {width}"
    return ""


def upcycled_model(dense: ModelConfig, plan: UpcyclePlan) -> ModelConfig:
    moe = MoeConfig(
        experts=plan.copies * plan.shards,
        top_k=plan.top,
        ffn=dense.dense_ffn // plan.shards,
        activation=dense.dense_activation,
        balance=BalanceConfig(aux_loss=0.001),
    )
    return replace(dense, moe=moe)


@dataclass(frozen=True)
class UpcycledWeights:
    """Boxes of the MoE model's tensors, each computed from the dense model's when it is fetched."""

    plan: UpcyclePlan
    dense: ModelConfig
    source: FetchBox
    seed: int

    def fetch_box(self, name: str, box: Box) -> torch.Tensor:
        if name.endswith("moe.router.weight"):
            return self.router_weight(name)[box_slices(box)]
        dense_name = self.dense_source_name(name)
        if ".moe.experts." not in name:
            return self.source(dense_name, box)
        boxes = self.dense_boxes(box)
        experts = [self.source(dense_name, dense_box) for dense_box in boxes]
        stacked = torch.stack(experts)
        if name.endswith("down"):
            return stacked.float() * self.plan.shards  # rounded when it is written
        return stacked

    def dense_source_name(self, name: str) -> str:
        """The dense tensor that a tensor is computed from: blocks.0.moe.experts.down -> blocks.0.dense.down.weight.
        A router is computed from none, and is saved with the dtype of the norm."""
        if name.endswith(("moe.norm.weight", "moe.router.weight")):
            return name.replace("moe.router", "moe.norm").replace("moe.norm", "dense.norm")
        if ".moe.experts." in name:
            return name.replace("moe.experts.", "dense.") + ".weight"
        return name

    def dense_boxes(self, box: Box) -> Iterator[Box]:
        """For each expert of the box, its box of the dense tensor. Behind the dim of experts, the second dim is the
        inner width, in both tensors."""
        (first, count), outer, (start, size), *rest = box
        width = self.dense.dense_ffn // self.plan.shards
        for expert in range(first, first + count):
            shard = expert % self.plan.shards
            inner = shard * width + start
            yield (outer, (inner, size), *rest)

    def router_weight(self, name: str) -> torch.Tensor:
        """Random rows, one for each copy, repeated for its shards."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = (self.plan.copies, self.dense.hidden)
        rows = torch.empty(shape, dtype=torch.float32, device="cpu")
        rows.normal_(0.0, self.dense.init_std, generator=generator)
        return rows.repeat_interleave(self.plan.shards, dim=0)
