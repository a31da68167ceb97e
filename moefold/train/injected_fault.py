"""Injection of the fault that `observe.fault` orders (config/fault_order.py): a run that is damaged on purpose, to see
that the damage is found (train/non_finite.py, train/replica_check.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moefold.config.errors import UserError
from moefold.config.fault_order import STATE_KINDS, TIME_FAULTS, FaultOrder, parse_fault
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.weight_copies import count_change, keeps_values
from moefold.model.step_borders import is_differentiable
from moefold.model.steps import Carry, Step, StepRewrite, Steps
from moefold.shard.storage import LogicalValues
from moefold.train.assemble import Run
from moefold.watch.supervisor import RESTARTS_FILE

BAD_VALUES = {"nan": float("nan"), "inf": float("inf")}


@contextmanager
def injected_fault(run: Run, number: int, again: bool = False) -> Iterator[None]:
    """The fault of the step with this number, if one is ordered for it and for this rank. `again`: the step is run
    again, to find the fault; weights are as before behind the block."""
    text = run.config.observe.fault
    order = parse_fault(text) if text else None
    if order is None or not is_due(run, order, number):
        yield
    elif order.value in TIME_FAULTS:
        with disturbed_time(order):
            yield
    elif order.place == "gradient":
        with spoiled_gradient(run, order):
            yield
    elif order.place == "output":
        with spoiled_output(run, order):
            yield
    elif not again:
        damage_memory(run, order)
        yield
    elif order.place == "weight":
        with weight_damaged_again(run, order):
            yield
    else:
        yield  # nothing has mended optimizer state


def is_due(run: Run, order: FaultOrder, number: int) -> bool:
    """Whether this rank has the fault in the step with this number; one that is ordered once, in no restarted run."""
    if order.once and (run.out / RESTARTS_FILE).exists():
        return False
    return order.is_due(run.world.rank, number, run.out)


@contextmanager
def disturbed_time(order: FaultOrder) -> Iterator[None]:
    """Inside, the clock has jumped; or the block takes so many times as long."""
    if order.value == "clock":
        shift_wall_clock(order.seconds)
    begun = time.perf_counter()
    yield
    elapsed = time.perf_counter() - begun
    time.sleep(max(0, order.times - 1) * elapsed)


def shift_wall_clock(seconds: int) -> None:
    """Let the clock of this process jump, as that of a machine does which is set: what measures durations does not."""
    time_before, local_before = time.time, time.localtime
    written_before = time.strftime

    def local_time(moment: float | None = None) -> time.struct_time:
        return local_before(time.time() if moment is None else moment)

    def written_time(form: str, moment: time.struct_time | None = None) -> str:
        return written_before(form, local_time() if moment is None else moment)

    time.time = lambda: time_before() + seconds
    time.localtime = local_time
    time.strftime = written_time


@contextmanager
def weight_damaged_again(run: Run, order: FaultOrder) -> Iterator[None]:
    """The gather of updated shares has mended a damaged weight, if its value is another rank's."""
    weights, element = find_weight(run, order)
    before = weights[element].clone()
    damage_element(weights, element, order)
    try:
        yield
    finally:
        weights[element] = before


def damage_memory(run: Run, order: FaultOrder) -> None:
    """Damage an element of a weight or of optimizer state."""
    if order.place in STATE_KINDS:
        values, element = find_state(run, order)
    else:
        values, element = find_weight(run, order)
    if isinstance(values, Tensor):
        damage_element(values, element, order)
        return
    one = values.get(element, element + 1)
    damage_element(one, 0, order)
    values.put(element, element + 1, one)


def damage_element(values: Tensor, element: int, order: FaultOrder) -> None:
    with torch.no_grad():
        if order.value == "flip":
            flip_bit(values, element, order.bit)
        else:
            values[element] = BAD_VALUES[order.value]


def flip_bit(values: Tensor, element: int, bit: int) -> None:
    octets = values.view(torch.uint8)
    size = values.element_size()
    place, rest = divmod(bit % (8 * size), 8)
    octets[size * element + place] ^= 1 << rest


def find_weight(run: Run, order: FaultOrder) -> tuple[Tensor, int]:
    """The memory of a parameter's weights on this rank as a flat tensor, and the element to damage."""
    run.parameters.await_all_buckets()
    parameter = find_parameter(run, order)
    tensor = parameter.tensor
    first, last = elements_of_expert(parameter, order)
    if keeps_values(tensor):
        count_change([tensor])  # copies of it in other formats are made again
        return tensor.detach().view(-1), first
    for share in run.optimizer.shares:  # with zero3 a rank has its share alone
        bucket = share.bucket
        for piece in bucket.pieces():
            element = max(first, piece.first)
            if piece.parameter.name == order.name and element < min(last, piece.last):
                mine = share.storage.weights_of_share(bucket.share)
                return mine, piece.offset + element - piece.first
    raise not_held(order)


def find_state(run: Run, order: FaultOrder) -> tuple[Tensor | LogicalValues, int]:
    """Optimizer state of a parameter on this rank, and the element of it to damage."""
    parameter = find_parameter(run, order)
    first, last = elements_of_expert(parameter, order)
    for owner, kind, begin, values in run.optimizer.state():
        element = max(first, begin)
        end = min(last, begin + len(values))
        if owner.name == order.name and kind == order.place and element < end:
            return values, element - begin
    raise not_held(order)


def find_parameter(run: Run, order: FaultOrder) -> DeclaredParameter:
    for parameter in declared_parameters(run.model):
        if parameter.name == order.name:
            return parameter
    raise not_held(order)


def not_held(order: FaultOrder) -> UserError:
    what = f"{order.place} of {order.name}"
    if order.expert is not None:
        what += f", expert {order.expert}"
    return UserError(
        f"observe.fault damages {what} on rank {order.rank}, which does not hold it; name a tensor of that rank, or "
        "another rank"
    )


def elements_of_expert(parameter: DeclaredParameter, order: FaultOrder) -> tuple[int, int]:
    """The elements of the expert in this rank's part of the parameter; all, where no expert is named."""
    size = parameter.tensor.numel()
    if order.expert is None:
        return 0, size
    begin, count = parameter.part[0]
    local = order.expert - begin
    if parameter.declaration.placement.grid != "expert" or not 0 <= local < count:
        raise not_held(order)
    each = size // count
    return local * each, (local + 1) * each


@contextmanager
def spoiled_gradient(run: Run, order: FaultOrder) -> Iterator[None]:
    """Inside, the sum of this rank's gradients of a parameter is damaged, before it is summed over ranks."""
    parameter = find_parameter(run, order)
    element, _ = elements_of_expert(parameter, order)

    def spoil(name: str, total: Tensor) -> None:
        if name == order.name:
            damage_element(total, element, order)

    readers = run.gradients.sum_readers
    readers.insert(0, spoil)
    try:
        yield
    finally:
        readers.remove(spoil)


@contextmanager
def spoiled_output(run: Run, order: FaultOrder) -> Iterator[None]:
    """Inside, the output of a step of the model is damaged, in every microbatch."""
    model = run.model
    before = model.rewrite_steps
    model.rewrite_steps = partial(spoil_step, order, before)
    try:
        yield
    finally:
        model.rewrite_steps = before


def spoil_step(order: FaultOrder, rewrite: StepRewrite, steps: Steps) -> Steps:
    spoiled: Steps = []
    for step in steps:
        if step.spec.name == order.name and order.layer in (None, step.layer):
            run = partial(run_spoiled, order, step)
            step = replace(step, run=run)
        spoiled.append(step)
    return rewrite(spoiled)


def run_spoiled(order: FaultOrder, step: Step, carry: Carry) -> Carry:
    """The step, with a bad value in the first tensor that it has made; of an expert, in that expert's first row."""
    known = set(map(id, tree_flatten(carry)[0]))
    flat, structure = tree_flatten(step.run(carry))
    for number, leaf in enumerate(flat):
        if is_differentiable(leaf) and id(leaf) not in known:
            flat[number] = leaf + bad_values(leaf, order, carry)
            break
    return tree_unflatten(flat, structure)


def bad_values(leaf: Tensor, order: FaultOrder, carry: Carry) -> Tensor:
    """Zeros but for one bad value."""
    bad = torch.zeros_like(leaf)
    row = 0
    if order.expert is not None:
        ends_e = carry["receipt"].order.ends_e
        local = order.expert % len(ends_e)
        row = int(ends_e[local - 1]) if local else 0
        if row == ends_e[local]:
            return bad  # no token has chosen the expert
    by_row = bad.view(len(bad), -1) if bad.dim() else bad.view(1, 1)
    by_row[row, 0] = BAD_VALUES[order.value]
    return bad
