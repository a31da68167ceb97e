"""Steps whose loss or gradient is not finite: refused, and traced to the first bad value.

The weights were not touched, so the step can be run again from the same state (train/step_trace.py). A step that is
finite when it runs again points to a passing fault of the hardware.
"""

from __future__ import annotations

from moefold.comm.host_objects import choose_object
from moefold.train.assemble import Run
from moefold.train.fault_log import RecordedFault
from moefold.train.last_sound import last_sound_of
from moefold.train.replica_check import compare_replicas
from moefold.train.step import StepReport
from moefold.train.step_trace import tell_suspect, trace_step
from moefold.watch.position import slow_phase

SUSPECTS = {
    "device": "; it stays on rank {rank} when that rank computes other sequences: its device or memory is suspect",
    "data": "; it moves with the sequences of rank {rank} when another rank computes them: data or software is suspect",
}


class NonFiniteStep(RecordedFault):
    """A step that stops the run. Its record has `place`, the first bad value of all ranks, where the step has it again,
    `suspect`, device or data, where other ranks could tell, and `ranks` whose own losses were bad."""


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
        suspect = None if place is None else tell_suspect(run, report.number, place)
        suspects = ranks_with_bad_losses(run, report)
    last_sound = last_sound_of(run)
    origin = f"the first bad value: {place}"
    if place is not None and suspect is not None:
        origin += SUSPECTS[suspect].format(rank=place.rank)
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
        suspect=suspect,
    )


def ranks_with_bad_losses(run: Run, report: StepReport) -> list[int]:
    return choose_object(report.own_is_finite, ranks_of_false, run.world.everyone)


def ranks_of_false(flags: list[bool]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if not flag]
