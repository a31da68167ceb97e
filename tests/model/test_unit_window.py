"""A window of units, by a toy one: what is brought, when, and how often, in passes alone and in pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.step_specs import StepSpec
from moefold.model.steps import PassKind, Step
from moefold.model.unit_window import ComingPass, UnitWindow
from moefold.observe.trace import SpanRecorder

LAYERS = 8
FORWARD: ComingPass = ((0, True), "F")
BACKWARD: ComingPass = ((0, True), "D")


class WeightsAtOnce(NamedTuple):
    tensor: Tensor

    def wait(self) -> None: ...

    def wait_for_works(self) -> None: ...

    def arriving_tensors(self) -> Iterable[Tensor]:
        return [self.tensor]


class ToyWindow(UnitWindow):
    """Layers of one step and one unit each."""

    def __init__(self, most: int):
        super().__init__(SpanRecorder(0), most)
        self.tensors: dict[str, Tensor] = {}
        self.layers: list[Step] = []
        for number in range(LAYERS):
            tensor = torch.empty(64)
            tensor.untyped_storage().resize_(0)
            self.tensors[f"layer {number}"] = tensor
            spec = StepSpec(f"step {number}", "compute", True, "")
            self.layers.append(Step(spec, dict, number))

    def units(self) -> Collection[str]:
        return self.tensors.keys()

    def tensors_of(self, unit: str) -> list[Tensor]:
        return [self.tensors[unit]]

    def bring(self, unit: str, readers: Sequence[Any]) -> list[WeightsAtOnce]:
        number = list(self.tensors).index(unit)
        tensor = self.tensors[unit].fill_(number)
        return [WeightsAtOnce(tensor)]

    def release(self, unit: str) -> None: ...

    def run_step(self, number: int, kind: PassKind) -> None:
        """A forward reads its weights, and a backward too."""
        step = self.layers[number]
        self.before(step, kind, (0, 0))
        if kind == "F":
            self.before_module(frozenset([f"layer {number}"]))
        assert self.tensors[f"layer {number}"].eq(number).all()
        assert len(self.here) <= self.most
        self.after(step, kind, (0, 0))

    def run_slot(self, *passes: ComingPass, coming: Sequence[ComingPass]) -> None:
        """The steps of the passes in turn."""
        self.announce(coming)
        for number in range(LAYERS):
            for _, kind in passes:
                self.run_step(number if kind == "F" else LAYERS - 1 - number, kind)


def test_each_unit_comes_ahead_and_a_pass_finds_what_the_one_before_it_used_last():
    window = ToyWindow(most=2)
    for _ in range(2):
        window.run_slot(FORWARD, coming=[BACKWARD])
        window.run_slot(BACKWARD, coming=[FORWARD])
    late = window.late_units
    arrivals = window.arrivals
    window.run_slot(FORWARD, coming=[BACKWARD])
    window.run_slot(BACKWARD, coming=[FORWARD])
    assert window.late_units == late
    assert window.arrivals - arrivals == 2 * (LAYERS - 2)


def test_in_pairs_no_pass_takes_what_the_other_needs_next():
    """Of eight layers a slot brings 2 and 5, 3 and 4, 6 and 1, 7 and 0: what comes between is here, of the slot before
    or of the other pass."""
    window = ToyWindow(most=4)
    window.run_slot(FORWARD, coming=[FORWARD, BACKWARD])
    pair = (FORWARD, BACKWARD)
    window.run_slot(*pair, coming=pair)
    late = window.late_units
    for _ in range(2):
        arrivals = window.arrivals
        window.run_slot(*pair, coming=pair)
        assert window.late_units == late
        assert window.arrivals - arrivals == LAYERS
