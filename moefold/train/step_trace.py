"""Trace of a step that is not finite: run again from the same state, with every value checked (train/finite_checks.py).
Nothing is left of that: counters, biases and random states are put back, nothing is updated.

Run again on other ranks, each with the sequences of another, the step tells a device from data:

    rank        0        1        2        3
    first run   seqs 0   seqs 1   seqs 2   seqs 3      NaN on rank 2
    second run  seqs 1   seqs 2   seqs 3   seqs 0      NaN on rank 2: its device or memory; on rank 1: its data
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from moefold.checkpoint.live.logical_tensors import restore_rng_state, rng_state_tensors
from moefold.comm.host_objects import choose_object
from moefold.data.loader import BatchLoader
from moefold.dispatch.clone_weights import CloneFigures
from moefold.layout.axes import World
from moefold.model.attention.logit_watch import LogitWatch
from moefold.model.moe.router import ExpertLoad, RecordChoices
from moefold.train.assemble import Run
from moefold.train.finite_checks import BACKWARD, FORWARD, BadPlace, FiniteChecks, PlaceOrder, bad_state
from moefold.train.injected_fault import injected_fault
from moefold.train.step import run_microbatches, sequences_of_step


class KeptLoad(NamedTuple):
    """What a forward changes of a layer's load, apart from its buffers."""

    load: ExpertLoad
    moved: int
    clones: CloneFigures
    record: RecordChoices | None

    @classmethod
    def of(cls, load: ExpertLoad) -> KeptLoad:
        return cls(load, load.moved, load.clones, load.record)

    def put_back(self) -> None:
        load = self.load
        load.moved = self.moved
        load.clones = self.clones
        load.record = self.record


def trace_step(run: Run, number: int) -> BadPlace | None:
    """The first bad value of all ranks: in the state of the run, or else in the step of this number, which is run
    again. Every rank calls this."""
    with injected_fault(run, number, again=True):
        place = first_of_ranks(run, bad_state(run))
    return place or trace_again(run, number, run.loader)


def tell_suspect(run: Run, number: int, place: BadPlace) -> str | None:
    """What is suspect where a step has its bad value again: `device`, if the value stays on its rank when that rank
    computes other sequences; `data`, or the software that computes on it, if the value moves with the sequences; None
    where no other rank can compute what this one did, or where that gives another result. Every rank calls this."""
    world = run.world
    distance = distance_to_neighbour(world)
    is_local = place.order[0] in (FORWARD, BACKWARD)  # not state, not a sum over ranks
    if not is_local or not distance:
        return None
    is_of_expert = place.expert is not None or place.step == "experts"
    if is_of_expert and distance % ranks_with_all_experts(world):
        return None
    together = ranks_of_sequences(world)
    theirs = run.loader.of_rank(distance // together)
    elsewhere = trace_again(run, number, theirs)
    if elsewhere is None:
        return None
    stage_ranks = world.dp.size * together
    stage, inside = divmod(place.rank, stage_ranks)
    neighbour_inside = (inside - distance) % stage_ranks
    neighbour = stage * stage_ranks + neighbour_inside
    suspects = {place.rank: "device", neighbour: "data"}
    return suspects.get(elsewhere.rank)


def distance_to_neighbour(world: World) -> int:
    """How many ranks on the neighbour is whose sequences a rank takes: the same rank of other sequences and, if experts
    have replicas, of another replica. 0: there is none."""
    if world.dp.size == 1 or len(world.context_axes) > 1:  # ranks of groups of other sizes compute together
        return 0
    together = ranks_of_sequences(world)
    experts = ranks_with_all_experts(world)
    has_replicas = world.edp.size > 1
    return experts if has_replicas and experts % together == 0 else together


def ranks_of_sequences(world: World) -> int:
    """How many ranks have parts of the same sequences."""
    return world.cp.size * world.tp.size


def ranks_with_all_experts(world: World) -> int:
    """How many ranks have all experts between them."""
    return world.ep.size * world.etp.size


def trace_again(run: Run, number: int, loader: BatchLoader) -> BadPlace | None:
    """The first bad value of all ranks in a step that is run again, with a loader's share of the sequences."""
    checks = FiniteChecks(run)
    with ExitStack() as around:
        around.enter_context(kept_state(run))
        around.enter_context(checks.watching())
        around.enter_context(injected_fault(run, number, again=True))
        around.enter_context(run.row_guard.lifted())  # rows that found no room would hide a value
        around.enter_context(torch.enable_grad())
        rerun_step(run, number, loader)
        checks.look_at_reduced()
        run.gradients.begin()
        return first_of_ranks(run, checks.first)


def first_of_ranks(run: Run, own: BadPlace | None) -> BadPlace | None:
    return choose_object(own, first_place, run.world.everyone)


def first_place(places: list[BadPlace | None]) -> BadPlace | None:
    found = [place for place in places if place is not None]
    return min(found, key=order_and_rank, default=None)


def order_and_rank(place: BadPlace) -> tuple[PlaceOrder, int]:
    return place.order, place.rank


def rerun_step(run: Run, number: int, loader: BatchLoader) -> None:
    """Forward and backward of a step, and its sums over ranks, without an update."""
    sequences = sequences_of_step(run, number)
    batch = loader.batch_at(sequences.start, len(sequences))
    sums = run_microbatches(run, batch, lambda divisor: run.gradients.begin())
    run.gradients.finish(sums.divisor)


@contextmanager
def kept_state(run: Run) -> Iterator[None]:
    """What a forward and backward change of a run is put back behind the block. Nothing is recorded inside."""
    buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
    loads = list(map(KeptLoad.of, run.model.loads()))
    watches = [(watch, watch.largest_H) for watch in logit_watches(run)]
    random_state = rng_state_tensors(run.world)
    scales = dict(run.gradients.scales)
    records = run.operand_statistics.records
    run.operand_statistics.records = False
    for kept in loads:
        kept.load.record = None
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
        for kept in loads:
            kept.put_back()
        for watch, largest_H in watches:
            watch.largest_H = largest_H
        run.gradients.scales = scales
        run.operand_statistics.records = records
        restore_rng_state(random_state, run.world)


def logit_watches(run: Run) -> list[LogitWatch]:
    layers = run.qk_clip.layers.values()
    watches = [module.logit_watch for module in layers]
    return [watch for watch in watches if watch is not None]
