"""Row chunks: the steps of MoE layers that run once for each part of a microbatch's tokens (anatomy/row_chunks.py).

Each chunk has a carry of its own inside that of the microbatch, under a name that tells how far it is: what its steps
make does not meet what other chunks make, so they may run in any order. Its tokens and results are parts of those of
the layer, split by `plan` and put together by `join`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moefold.anatomy.row_chunks import CHUNKED_STEPS, specs_in_chunks
from moefold.model.steps import Carry, Step, StepRun, Steps, drop_from_carry
from moefold.model.token_layout import TokenShard

SHARD = "token_shard"
PARTS = "parts"  # of the carry that `plan` reads: in how many parts it plans
DISPATCHED = ("latent_TL", "h_TD")  # what is sent: the first that the carry has
COMBINED = ("latent_TL", "output_TD")  # what comes back


@dataclass(frozen=True)
class ShardPart:
    """The tokens of a chunk, from the rank's `first`: as much of a shard as the steps of chunks ask for."""

    shard: TokenShard
    first: int

    def numbers_of_rows(self, rows: int) -> Tensor:
        number_T = self.shard.token_number_T
        return number_T[self.first : self.first + rows]


def in_row_chunks(steps: Sequence[Step], chunks: int) -> Steps:
    """The steps of a stage, with those of its MoE layers in chunks."""
    specs = [step.spec for step in steps]
    chunked: Steps = []
    for spec, place in specs_in_chunks(specs, chunks):
        step = steps[place]
        run = step.run
        if spec.name == "plan":
            run = partial(plan_chunks, step.run, chunks)
        elif spec.chunk is not None:
            run = partial(run_chunk, step.run, spec.name, spec.chunk)
        elif spec.name == "join":
            run = partial(join_chunks, step.run, chunks)
        of_chunk = replace(step, spec=spec, run=run)
        chunked.append(of_chunk)
    return chunked


def entry_of(name: str, chunk: int) -> str:
    """The entry of the carry with a chunk behind its step of this name."""
    return f"{name}.{chunk}"


def plan_chunks(run: StepRun, chunks: int, carry: Carry) -> Carry:
    tokens = first_of(carry, DISPATCHED)
    whole = carry[tokens]
    shard = carry[SHARD]
    given = carry | {PARTS: chunks}
    planned = run(given)
    receipts = planned["receipt"]
    made = drop_from_carry(planned, PARTS, "receipt", "latent_TL")
    first = 0
    for chunk, part in enumerate(whole.tensor_split(chunks)):
        own: Carry = {}
        own[tokens] = part
        own[SHARD] = ShardPart(shard, first)
        own["receipt"] = receipts[chunk]
        entry = entry_of("plan", chunk)
        made[entry] = own
        first += len(part)
    return made


def run_chunk(run: StepRun, name: str, chunk: int, carry: Carry) -> Carry:
    """One step of one chunk, on the microbatch's carry with the chunk's entries in place."""
    number = CHUNKED_STEPS.index(name)
    before = ("plan", *CHUNKED_STEPS)[number]
    entry = entry_of(before, chunk)
    made = run(carry | carry[entry])
    own: Carry = {}
    for key, value in made.items():
        if value is not carry.get(key):
            own[key] = value
    behind = drop_from_carry(carry, entry)
    entry = entry_of(name, chunk)
    behind[entry] = own
    return behind


def join_chunks(run: StepRun, chunks: int, carry: Carry) -> Carry:
    last = CHUNKED_STEPS[-1]
    results: list[Carry] = []
    entries: list[str] = []
    for chunk in range(chunks):
        entry = entry_of(last, chunk)
        results.append(carry[entry])
        # Where steps run as a graph, the carry of the first chunk comes with what `plan` has made for the others.
        planned = entry_of("plan", chunk)
        entries += entry, planned
    joined = drop_from_carry(carry, "h_TD", *entries)
    combined = first_of(results[0], COMBINED)
    parts = [result[combined] for result in results]
    joined[combined] = torch.cat(parts)
    return run(joined)


def first_of(carry: Carry, names: Sequence[str]) -> str:
    """The first of these entries that the carry has."""
    return next(name for name in names if name in carry)
