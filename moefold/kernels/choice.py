"""The catalog's line for one implementation of an op, and the conditions that several ops share. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moefold.kernels.facts import Facts


def costs_nothing(_: Facts) -> float:
    return 0.0


def adds_no_note(_: Facts) -> str:
    return ""


@dataclass(frozen=True)
class Choice:
    """An implementation: when it may run, what it needs in words, and why one would want it.

    Of the implementations that may run, the one with the lowest `cost` is chosen; of equals, the first. `note` is a
    remark for these very facts, such as measured times; `refusal` says why it may not run with them, where that is not
    a lack of what it `needs`.
    """

    name: str
    when: Callable[[Facts], bool]
    needs: str
    why: str
    cost: Callable[[Facts], float] = costs_nothing
    note: Callable[[Facts], str] = adds_no_note
    refusal: Callable[[Facts], str] = adds_no_note
    on_request: bool = False  # a key asks for it; without that key it is not worth a word

    def reason_against(self, facts: Facts) -> str:
        return self.refusal(facts) or f"{self.name} needs {self.needs}"


Choices = dict[str, tuple[Choice, ...]]  # op -> its fast implementations, the preferred first

RENAMED_IMPLEMENTATIONS = {  # names of earlier versions, still accepted by kernels.force and in files of timings
    "by_hand": "recompute_backward",
    "adding": "fused_dgrad",
    "ordered": "deterministic",
    "spans": "varlen",
    "adjoint": "gather_backward",
}


def current_name(implementation: str) -> str:
    """The name now of an implementation that may have its earlier name."""
    return RENAMED_IMPLEMENTATIONS.get(implementation, implementation)


def always_runs(_: Facts) -> bool:
    return True


def runs_on_cuda(facts: Facts) -> bool:
    return facts.device == "cuda"


def is_invariant(facts: Facts) -> bool:
    return facts.invariant


def costs_less_than_nothing(_: Facts) -> float:
    return -1.0


def invariant_choice(why: str) -> Choice:
    """What runs where `kernels.invariant` asks for bits that do not depend on the batch."""
    needs = "kernels.invariant"
    return Choice("invariant", is_invariant, needs, why, costs_less_than_nothing, on_request=True)


TILED_ROWS = invariant_choice("rows in tiles of 64: bits of a row do not depend on the others (kernels.invariant)")


def triton_runs(facts: Facts) -> bool:
    is_recent = facts.capability >= (8, 0)
    return runs_on_cuda(facts) and is_recent and facts.triton


def triton_computes(facts: Facts) -> bool:
    """Kernels with arithmetic compute in fp32; kernels that only move rows take any dtype."""
    return triton_runs(facts) and facts.dtype in ("fp32", "bf16")


def triton_computes_bf16(facts: Facts) -> bool:
    return triton_runs(facts) and facts.dtype == "bf16"


def hopper_bf16_runs(facts: Facts) -> bool:
    """Kernels with Hopper's instructions (wgmma, TMA)."""
    is_hopper = facts.capability[0] == 9
    return triton_computes_bf16(facts) and is_hopper
