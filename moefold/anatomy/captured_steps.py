"""The steps that `memory.graphs static` captures: those whose shapes do not depend on routing and whose work is many
kernels. Neighbours of one layer are captured as one. Torch-free.

    attend > route > plan > dispatch > experts > combine > add        captured: attend + route, attend + mlp, shared
             route > shared >                              add

What a layer adds to the stream is added by the first norm of the next layer, inside its graph. Neighbours of two layers
stay apart: gradients of a layer leave for other ranks when its own backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from moefold.anatomy.step_specs import StepSpec

CAPTURED_READS: dict[str, tuple[str, ...]] = {  # by step: the entries of the carry that it reads
    "attend": ("stream",),
    "route": ("stream", "aux", "imposed"),
    "mlp": ("stream",),
    "shared": ("h_TD",),
}


S = TypeVar("S")
SpecOf = Callable[[S], StepSpec]


def runs_of_steps(steps: Iterable[S], spec_of: SpecOf[S]) -> list[list[S]]:
    """The steps of a layer in runs: captured neighbours, each of which needs but the one before; others alone."""
    runs: list[list[S]] = []
    last: StepSpec | None = None
    for step in steps:
        spec = spec_of(step)
        if last is not None and follows_in_graph(last, spec):
            runs[-1].append(step)
        else:
            runs.append([step])
        last = spec
    return runs


def follows_in_graph(last: StepSpec, spec: StepSpec) -> bool:
    are_captured = CAPTURED_READS.keys() >= {last.name, spec.name}
    return are_captured and set(spec.needs) <= {last.name}


def captured_runs(specs: Iterable[StepSpec]) -> list[str]:
    """The runs of a layer's steps that are captured, by the names of their steps: attend+route."""
    runs = runs_of_steps(specs, itself)
    captured = [run for run in runs if run[0].name in CAPTURED_READS]
    return [name_of_run(run) for run in captured]


def itself(spec: StepSpec) -> StepSpec:
    return spec


def name_of_run(specs: Iterable[StepSpec]) -> str:
    return "+".join(spec.name for spec in specs)
