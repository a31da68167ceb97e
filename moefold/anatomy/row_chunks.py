"""Row chunks: a microbatch's tokens in parts, each of which is dispatched, computed and combined by itself, so that a
part's exchange runs beside the experts of another. Torch-free.

    compute    attend route                shared      experts.0  experts.1  join add
    comm                     PLAN DISPATCH.0 DISPATCH.1           COMBINE.0  COMBINE.1

The plan is made for all chunks at once: their counts are exchanged together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from moefold.anatomy.step_specs import StepSpec

CHUNKED_STEPS = ("dispatch", "experts", "combine")


class PlacedSpec(NamedTuple):
    """A step, and the place of the step that it was made of."""

    spec: StepSpec
    place: int


def specs_in_chunks(specs: Sequence[StepSpec], chunks: int) -> Iterator[PlacedSpec]:
    """The steps of layers with those of `CHUNKED_STEPS` once for each chunk. Experts stand before the combine of their
    chunk, so that the steps may also run one after the other."""
    experts = 0
    for place, spec in enumerate(specs):
        if spec.name == "experts":
            experts = place
        elif spec.name == "dispatch":
            for chunk in range(chunks):
                sent = spec_of_chunk(spec, chunk, chunks, "plan")
                yield PlacedSpec(sent, place)
        elif spec.name == "combine":
            for chunk in range(chunks):
                computed = spec_of_chunk(specs[experts], chunk, chunks, f"dispatch.{chunk}")
                combined = spec_of_chunk(spec, chunk, chunks, computed.label)
                yield PlacedSpec(computed, experts)
                yield PlacedSpec(combined, place)
        elif spec.name == "join":
            needs = [f"combine.{chunk}" for chunk in range(chunks)]
            joined = replace(spec, needs=tuple(needs))
            yield PlacedSpec(joined, place)
        else:
            yield PlacedSpec(spec, place)


def spec_of_chunk(spec: StepSpec, chunk: int, chunks: int, need: str) -> StepSpec:
    share = 1 / chunks
    needs = (need,)
    return replace(spec, chunk=chunk, share=share, needs=needs)
