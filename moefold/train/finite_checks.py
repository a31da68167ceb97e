"""Checks for values that are no numbers (NaN, infinities), by their place: in the state of a run, and in every value of
a step while it runs.

Each rank finds places of its own. A place has an order, the same on all ranks, so that the first of all ranks is the
origin: state before the step, then forward from the first microbatch and layer on, then backward from the last layer
on, then sums over ranks. Of state, optimizer state comes before main weights and those before weights: bad moments make
bad weights, but a step with a bad gradient updates nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moefold.anatomy.row_chunks import CHUNKED_STEPS
from moefold.dispatch.base import Rows
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.held_share import held_share_of, held_values_of
from moefold.layout.weight_copies import keeps_values
from moefold.model.steps import Carry, Step, StepRewrite, Steps, inside_recompute
from moefold.optim.optimizer import MAIN_KIND, StatePiece
from moefold.shard.block_values import decoded
from moefold.shard.storage import ShardedWeights
from moefold.train.assemble import Run

STATE, FORWARD, BACKWARD, SUMS = range(4)
BEHIND_ALL_LAYERS = 1 << 20
DEQUANTISED_TOGETHER = 1 << 24  # values of a weight in blocks
UNDEFINED_ROWS = ("rows", "receipt")  # of the carry: rows behind the last expert's have any values
PlaceOrder = tuple[int, ...]


@dataclass(frozen=True)
class BadPlace:
    """A place of values that are no numbers. `kind`: weight, gradient, output, or a kind of optimizer state; `tensor`:
    of a parameter, a module or an entry of the carry; `step`: the step of the model that made an output."""

    order: PlaceOrder
    rank: int
    kind: str
    tensor: str
    layer: int | None = None
    expert: int | None = None
    step: str = ""
    value: str = "NaN"

    @property
    def record(self) -> dict[str, Any]:
        return asdict(self) | {"order": list(self.order)}

    def __str__(self) -> str:
        where = [f"{self.kind} {self.tensor}"]
        if self.step:
            where.append(f"step {self.step}")
        if self.layer is not None:
            where.append(f"layer {self.layer}")
        if self.expert is not None:
            where.append(f"expert {self.expert}")
        where.append(f"rank {self.rank}")
        return f"{self.value} in {', '.join(where)}"


def first_bad(values: Tensor) -> int | None:
    """The first element that is no number; None where all are."""
    flat = values.detach().reshape(-1)
    if flat.element_size() == 1:
        flat = flat.float()  # FP8
    finite = flat.isfinite()
    if finite.all():
        return None
    return int(finite.logical_not().int().argmax())


def name_of_value(values: Tensor, element: int) -> str:
    flat = values.detach().reshape(-1)
    value = flat[element].float()
    return "NaN" if value.isnan() else "Inf"


def layer_of_parameter(name: str) -> int | None:
    words = name.split(".")
    return int(words[1]) if words[0] == "blocks" else None


def expert_of_element(parameter: DeclaredParameter, element: int) -> int | None:
    """The expert that an element of this rank's part belongs to, counted over all ranks."""
    if parameter.declaration.placement.grid != "expert":
        return None
    begin, count = parameter.part[0]
    each = parameter.tensor.numel() // count
    return begin + element // each


def bad_state(run: Run) -> BadPlace | None:
    """The first bad place in this rank's state: optimizer state, main weights, weights, buffers, in this order. Where
    several ranks have the same bad weight, the one that updates it comes first."""
    state = list(run.optimizer.state())
    found = list(bad_optimizer_state(run.world.rank, state))
    run.parameters.await_all_buckets()
    found += bad_weights(run, updated_elements(state))
    found += bad_shares(run)
    found += bad_buffers(run)
    return min(found, key=lambda place: place.order, default=None)


def bad_optimizer_state(rank: int, state: Sequence[StatePiece]) -> Iterator[BadPlace]:
    """Bad optimizer state and main weights."""
    for number, (parameter, kind, first, values) in enumerate(state):
        flat = values if isinstance(values, Tensor) else values.get(0, len(values))
        element = first_bad(flat)
        if element is not None:
            order = (STATE, int(kind == MAIN_KIND), 0, number)
            value = name_of_value(flat, element)
            place = first + element
            yield place_in_parameter(order, rank, kind, parameter, place, value)


def updated_elements(state: Iterable[StatePiece]) -> dict[str, list[range]]:
    """By parameter: the elements that this rank updates."""
    owned: dict[str, list[range]] = {}
    for parameter, _, first, values in state:
        end = first + len(values)
        windows = owned.setdefault(parameter.name, [])
        windows.append(range(first, end))
    return owned


def bad_weights(run: Run, owned: dict[str, list[range]]) -> Iterator[BadPlace]:
    """The first bad value of each weight that this rank has between steps."""
    rank = run.world.rank
    for number, parameter in enumerate(declared_parameters(run.model)):
        windows = owned.get(parameter.name, [])
        for first, values in values_at_rest(parameter.tensor):
            element = first_bad(values)
            if element is None:
                continue
            place = first + element
            is_foreign = not any(place in window for window in windows)
            order = (STATE, 2, int(is_foreign), number)
            value = name_of_value(values, element)
            yield place_in_parameter(order, rank, "weight", parameter, place, value)
            break


def bad_buffers(run: Run) -> Iterator[BadPlace]:
    rank = run.world.rank
    for number, (name, buffer) in enumerate(run.model.named_buffers()):
        element = first_bad(buffer) if buffer.is_floating_point() else None
        if element is not None:
            order = (STATE, 3, 0, number)
            layer = layer_of_parameter(name)
            value = name_of_value(buffer, element)
            yield BadPlace(order, rank, "buffer", name, layer, value=value)


def values_at_rest(parameter: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The values that this rank has of a weight between steps, with the number of the first: what blocks stand for is
    dequantised some rows at a time. Nothing of weights that are trained in shares (`bad_shares`)."""
    first, held = held_values_of(parameter)
    has_nothing = held is parameter and not keeps_values(parameter)
    is_trained_share = held_share_of(parameter) is not None and parameter.requires_grad
    if has_nothing or is_trained_share:
        return
    if isinstance(held, Tensor):
        yield first, held
        return
    rows = held.view((-1, held.width))
    step = max(1, DEQUANTISED_TOGETHER // held.width) * held.width
    for begin in range(0, held.numel(), step):
        end = min(begin + step, held.numel())
        window = slice(begin, end)
        blocks = rows.elements(window)
        yield first + begin, blocks.dequantised()


def bad_shares(run: Run) -> Iterator[BadPlace]:
    """Bad weights in shares of parameters that have no memory of their own (zero3)."""
    rank = run.world.rank
    for share in run.optimizer.shares:
        bucket = share.bucket
        if not isinstance(share.storage, ShardedWeights):
            continue
        mine = share.storage.held_weights(bucket.share)
        if mine is None:  # main weights are looked at with the optimizer's state
            continue
        for piece in bucket.pieces():
            part = mine[piece.window]
            element = first_bad(part)
            if element is not None:
                order = (STATE, 2, 0, share.number)
                value = name_of_value(part, element)
                place = piece.first + element
                yield place_in_parameter(order, rank, "weight", piece.parameter, place, value)


def place_in_parameter(
    order: PlaceOrder, rank: int, kind: str, parameter: DeclaredParameter, element: int, value: str
) -> BadPlace:
    layer = layer_of_parameter(parameter.name)
    expert = expert_of_element(parameter, element)
    return BadPlace(order, rank, kind, parameter.name, layer, expert, value=value)


def depth_of_step(step: Step) -> int:
    """Where a step lies in the model: its layer, before all layers (the embedding), or behind them."""
    if step.layer is not None:
        return step.layer
    return -1 if step.spec.name == "embed" else BEHIND_ALL_LAYERS


def rows_of_results(rows: Rows | None) -> Rows | None:
    """The rows that results of experts are of; None: they are of tokens, and all defined."""
    return rows if rows is not None and rows.around is None else None


class StepInChecks(threading.local):
    """The step that this thread runs now, and how many values of it were looked at. Exchanges may have a thread."""

    def __init__(self):
        self.step: Step | None = None
        self.order: PlaceOrder = ()
        self.looks = 0


class FiniteChecks:
    """Checks of every value that a step of training makes on this rank: outputs of the model's steps and modules, their
    gradients, gradients of parameters. The first bad place of forward and backward is kept."""

    def __init__(self, run: Run):
        self.run = run
        self.rank = run.world.rank
        self.first: BadPlace | None = None
        self.parameters = {parameter.name: parameter for parameter in declared_parameters(run.model)}
        self.runs = Counter[tuple[int, str, bool]]()  # of each step so far, in forward and in recompute
        self.open = StepInChecks()
        self.in_backward: PlaceOrder = (0, 0, 0)  # the step that backward is in

    @contextmanager
    def watching(self) -> Iterator[None]:
        model = self.run.model
        rewrite = model.rewrite_steps
        model.rewrite_steps = partial(self.check_steps, rewrite)
        hooks: list[Any] = []
        for name, module in model.named_modules():
            if ".experts." not in f"{name}.":  # its rows may be undefined; the experts' output is looked at
                look = partial(self.look_at_module, name)
                hook = module.register_forward_hook(look)
                hooks.append(hook)
        readers = self.run.gradients.sum_readers
        readers.append(self.look_at_sum)
        try:
            yield
        finally:
            readers.remove(self.look_at_sum)
            for hook in hooks:
                hook.remove()
            model.rewrite_steps = rewrite

    def keep_first(self, place: BadPlace) -> None:
        if self.first is None or place.order < self.first.order:
            self.first = place

    def check_steps(self, rewrite: StepRewrite, steps: Steps) -> Steps:
        checked: Steps = []
        for index, step in enumerate(steps):
            run = partial(self.run_checked, step, index)
            checked.append(replace(step, run=run))
        return rewrite(checked)

    def run_checked(self, step: Step, index: int, carry: Carry) -> Carry:
        again = inside_recompute()
        depth = depth_of_step(step)
        seen = (depth, step.spec.name, again)
        microbatch = self.runs[seen] // self.runs_of_microbatch(step)
        self.runs[seen] += 1
        now = self.open
        now.step = step
        now.order = (microbatch, depth, index)
        now.looks = 0
        rows = carry.get("rows")
        given = set(map(id, tree_leaves(carry)))
        carry = step.run(carry)
        for name, entry in carry.items():
            if name in UNDEFINED_ROWS:
                continue
            rows_of_entry = rows_of_results(rows) if name == "y_RD" else None
            for leaf in tree_leaves(entry):
                if isinstance(leaf, Tensor) and id(leaf) not in given:
                    self.look_at_output(name, leaf, rows_of_entry)
        now.step = None
        return carry

    def runs_of_microbatch(self, step: Step) -> int:
        """How often a step runs for one microbatch: once, or for each of its row chunks."""
        is_chunked = step.spec.name in CHUNKED_STEPS
        return self.run.config.parallel.row_chunks if is_chunked else 1

    def look_at_output(self, name: str, leaf: Tensor, rows: Rows | None) -> None:
        """Look at an entry of the carry now, and at its gradient in backward."""
        if not leaf.is_floating_point():
            return
        step = self.open.step
        assert step is not None
        order = self.open.order
        if not inside_recompute():
            forward_order = self.next_look()
            self.look("output", name, leaf, forward_order, step, rows)
        if leaf.requires_grad:
            look = partial(self.look_at_gradient, name, step, order, rows)
            leaf.register_hook(look)

    def look_at_module(self, name: str, _module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        step = self.open.step
        if step is None or inside_recompute():
            return
        given_rows = (given for given in inputs if isinstance(given, Rows))
        rows = rows_of_results(next(given_rows, None))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                order = self.next_look()
                self.look("output", name, leaf, order, step, rows)

    def next_look(self) -> PlaceOrder:
        """The order of the next value that forward makes."""
        now = self.open
        now.looks += 1
        return (FORWARD, *now.order, now.looks)

    def look_at_gradient(self, name: str, step: Step, order: PlaceOrder, rows: Rows | None, gradient: Tensor) -> None:
        microbatch, depth, index = order
        self.in_backward = (microbatch, -depth, -index)
        backward_order = (BACKWARD, *self.in_backward, 0)
        self.look("gradient", name, gradient, backward_order, step, rows)

    def look_at_sum(self, name: str, total: Tensor) -> None:
        """Look at this rank's sum of a parameter's gradients."""
        element = first_bad(total)
        if element is not None:
            order = (BACKWARD, *self.in_backward, 1)
            value = name_of_value(total, element)
            parameter = self.parameters[name]
            place = place_in_parameter(order, self.rank, "gradient", parameter, element, value)
            self.keep_first(place)

    def look(self, kind: str, name: str, values: Tensor, order: PlaceOrder, step: Step, rows: Rows | None) -> None:
        if rows is not None:
            end = int(rows.order.ends_e[-1])
            values = values[:end]
        element = first_bad(values)
        if element is None:
            return
        expert = None
        if rows is not None:
            width = values.numel() // len(values)
            row = element // width
            expert = self.expert_of_row(row, rows)
        value = name_of_value(values, element)
        place = BadPlace(order, self.rank, kind, name, step.layer, expert, step.spec.name, value)
        self.keep_first(place)

    def expert_of_row(self, row: int, rows: Rows) -> int:
        ends_e = rows.order.ends_e
        local = int(torch.searchsorted(ends_e, row, right=True))
        return self.run.world.ep.index * len(ends_e) + local

    def look_at_reduced(self) -> None:
        """Look at this rank's shares of the sums over ranks."""
        for bucket in self.run.gradients.buckets:
            share = bucket.reduced_gradient_share
            for piece in bucket.pieces():
                part = decoded(share[piece.window])
                element = first_bad(part)
                if element is not None:
                    value = name_of_value(part, element)
                    number = piece.first + element
                    order = (SUMS, 0, 0, 0, 0)
                    place = place_in_parameter(order, self.rank, "gradient sum", piece.parameter, number, value)
                    self.keep_first(place)
