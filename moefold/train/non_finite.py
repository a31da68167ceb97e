"""Steps whose loss or gradient is not finite: refused, and traced to the first bad value.

The weights were not touched, so the step can be run again from the same state, with every value checked
(train/finite_checks.py). Nothing is left of that: counters, biases and random states are put back, nothing is updated.
A step that is finite when it runs again points to a passing fault of the hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moefold.checkpoint.live.logical_tensors import restore_rng_state, rng_state_tensors
from moefold.comm.host_objects import choose_object
from moefold.model.attention.attention_base import LogitWatch
from moefold.train.assemble import Run
from moefold.train.fault_log import RecordedFault
from moefold.train.finite_checks import BadPlace, FiniteChecks, bad_state
from moefold.train.injected_fault import injected_fault
from moefold.train.last_sound import last_sound_of
from moefold.train.replica_check import compare_replicas
from moefold.train.step import StepReport, run_microbatches, sequences_of_step
from moefold.watch.position import slow_phase


class NonFiniteStep(RecordedFault):
    """A step that stops the run. Its record has `place`, the first bad value of all ranks, where the step has it again,
    and `ranks` whose own losses were bad."""


def refuse_non_finite(run: Run, report: StepReport) -> None:
    """Stop a run whose loss or gradient is not finite, but for fp16 with a loss scale that can still be halved. Neither
    that step nor, where it stops the run, one launched since changed the weights."""
    loss, norm = report.loss, report.grad_norm
    if report.is_finite or run.loss_scale.can_go_on(report.loss_scale):
        return
    touched = "the weights were not touched"
    if report.units:
        touched = f"the weights of {', '.join(report.skipped_units) or 'no unit'} were not touched, others were updated"
    compare_replicas(run)
    with slow_phase("trace"):
        place = trace_step(run, report.number)
        suspects = ranks_with_bad_losses(run, report)
    last_sound = last_sound_of(run)
    origin = f"the first bad value: {place}"
    if place is None:
        origin = "run again, the step is finite: a passing fault, of the hardware or of a kernel"
        if suspects:
            origin += f"; losses were bad on ranks {', '.join(map(str, suspects))}"
    optim = run.config.optim
    raise NonFiniteStep(
        f"step {report.number}: loss is {loss:g} and gradient norm is {norm:g}; {touched}; {origin}. {last_sound}, "
        f"with a lower --optim.lr (now {optim.lr:g}) or --optim.max_norm (now {optim.max_norm:g})",
        report.number,
        "not finite",
        what=origin,
        place=place.record if place else None,
        ranks=suspects,
    )


def ranks_with_bad_losses(run: Run, report: StepReport) -> list[int]:
    return choose_object(report.own_is_finite, ranks_of_false, run.world.everyone)


def ranks_of_false(flags: list[bool]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if not flag]


def trace_step(run: Run, number: int) -> BadPlace | None:
    """The first bad value of all ranks: in the state of the run, or else in the step of this number, which is run
    again. Every rank calls this."""
    checks = FiniteChecks(run)
    with kept_state(run), checks.watching(), injected_fault(run, number, again=True), torch.enable_grad():
        place = first_of_ranks(run, bad_state(run))
        if place is None:
            rerun_step(run, number)
            checks.look_at_reduced()
            run.gradients.begin()
            place = first_of_ranks(run, checks.first)
    return place


def first_of_ranks(run: Run, own: BadPlace | None) -> BadPlace | None:
    return choose_object(own, first_place, run.world.everyone)


def first_place(places: list[BadPlace | None]) -> BadPlace | None:
    found = [place for place in places if place is not None]
    return min(found, key=lambda place: (place.order, place.rank), default=None)


def rerun_step(run: Run, number: int) -> None:
    """Forward and backward of a step, and its sums over ranks, without an update."""
    sequences = sequences_of_step(run, number)
    batch = run.loader.batch_at(sequences.start, len(sequences))
    sums = run_microbatches(run, batch, lambda divisor: run.gradients.begin())
    run.gradients.finish(sums.divisor)


@contextmanager
def kept_state(run: Run) -> Iterator[None]:
    """What a forward and backward change of a run is put back behind the block. Nothing is recorded inside."""
    buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
    loads = [(load, load.moved, load.record) for load in run.model.loads()]
    watches = [(watch, watch.largest_H) for watch in logit_watches(run)]
    random_state = rng_state_tensors(run.world)
    scales = dict(run.gradients.scales)
    records = run.operand_statistics.records
    run.operand_statistics.records = False
    for load, _, _ in loads:
        load.record = None
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
        for load, moved, record in loads:
            load.moved = moved
            load.record = record
        for watch, largest_H in watches:
            watch.largest_H = largest_H
        run.gradients.scales = scales
        run.operand_statistics.records = records
        restore_rng_state(random_state, run.world)


def logit_watches(run: Run) -> list[LogitWatch]:
    watches = [module.logit_watch for module in run.qk_clip.layers.values()]
    return [watch for watch in watches if watch is not None]
