"""Segments: the steps of a stage, cut where another piece of work can run in between.

A segment is a run of neighbouring steps on one lane. Segments form a graph, as their steps do (anatomy/step_specs.py):

    attend route > PLAN DISPATCH > experts > COMBINE > add attend route > ...
    attend route > shared >                            add
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from moefold.anatomy.step_specs import Lane
from moefold.model.steps import Step


@dataclass(frozen=True)
class Segment:
    """Steps that run one after the other. `needs`: numbers of earlier segments; none for the first. The carry is that
    of the first of them, with what the others have added."""

    lane: Lane
    steps: tuple[Step, ...]
    needs: tuple[int, ...] = ()


Segments = Sequence[Segment]


def one_segment(steps: Sequence[Step]) -> Segments:
    """All steps, uncut: the compute lane runs their exchanges too."""
    return [Segment("compute", tuple(steps))]


def segments_for_pairing(steps: Sequence[Step]) -> Segments:
    """A segment for each step, between which steps of another microbatch may run. Neighbours on the comm lane are one:
    nothing could run between them."""
    return cut_into_segments(steps, joined=["comm"])


def segments_of_one_microbatch(steps: Sequence[Step]) -> Segments:
    """Segments that let steps run beside an exchange of their own microbatch; one segment if none can."""
    segments = cut_into_segments(steps, joined=["comm", "compute"])
    for segment in segments:
        if len(segment.needs) > 1:
            return segments
    return one_segment(steps)


def cut_into_segments(steps: Sequence[Step], joined: Collection[Lane]) -> Segments:
    """Segments of the steps; a step on one of the `joined` lanes continues the segment of that lane before it, if it
    needs nothing else. Steps of row chunks have segments of their own: others need them one by one."""
    segments: list[Segment] = []
    segment_of: dict[str, int] = {}  # by label: the segment of the nearest step of that label
    for step in steps:
        spec = step.spec
        lane = spec.lane
        last = len(segments) - 1
        needs = tuple(map(segment_of.__getitem__, spec.needs))
        if segments and not needs:
            needs = (last,)
        segment = Segment(lane, (step,), needs)
        follows = needs == (last,) and segments[last].lane == lane
        if follows and lane in joined and spec.chunk is None:
            before = segments.pop()
            steps_so_far = (*before.steps, step)
            segment = replace(before, steps=steps_so_far)
        segment_of[spec.label] = len(segments)
        segments.append(segment)
    return segments
