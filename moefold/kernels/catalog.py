"""The catalog of implementations: which one an op uses for given facts, and why. Torch-free.

`explain` and the planner read it in milliseconds; the op's own file holds the code. Each subject lists its ops in its
`choices.py`. The reference needs no line: it is used where no other implementation may run. A name in `choices.py`
without code, or the reverse, is an error at import or in a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moefold.config.errors import UserError, one_of
from moefold.kernels.attention import choices as attention
from moefold.kernels.choice import Choice, Choices, current_name
from moefold.kernels.experts import choices as experts
from moefold.kernels.facts import Facts
from moefold.kernels.linear import choices as linear
from moefold.kernels.norm import choices as norm
from moefold.kernels.optimizer import choices as optimizer
from moefold.kernels.quantise import choices as quantise
from moefold.kernels.routing import choices as routing
from moefold.kernels.vocabulary import choices as vocabulary

CATALOG: Choices = {  # op -> its fast implementations, the preferred first
    **vocabulary.CHOICES,
    **norm.CHOICES,
    **linear.CHOICES,
    **attention.CHOICES,
    **routing.CHOICES,
    **experts.CHOICES,
    **optimizer.CHOICES,
    **quantise.CHOICES,
}


# Implementations that read values of the device on the host: a step that calls one cannot be captured.
HOST_READERS = {
    "adamw": ("reference", "fused"),
    "adamw_blocks": ("reference", "fused"),
    "grouped_gemm": ("reference",),
    "grouped_gemm_weight": ("reference",),
}


def host_readers(chosen: Mapping[str, str], has_blocks: bool) -> list[str]:
    """Those of the chosen implementations, by op, that read on the host. Fused experts call no grouped GEMM, and find
    the matrices of a base in blocks on the device."""
    found: list[str] = []
    expert_mlp = chosen.get("expert_mlp", "reference")
    fused = expert_mlp != "reference"
    if has_blocks and not fused:
        found.append(f"expert_mlp = {expert_mlp} of a base in blocks")
    for op, readers in HOST_READERS.items():
        is_part = op.startswith("grouped_gemm")
        if fused and is_part:
            continue
        name = chosen.get(op)
        if name in readers:
            found.append(f"{op} = {name}")
    return found


def pick_implementation(op: str, facts: Facts, forced: str | None = None) -> tuple[str, str]:
    """The name of the implementation to use, and the reason in words."""
    wanted = CATALOG[op]
    if forced is not None:
        wanted = [choice for choice in wanted if choice.name == forced]
    able = [choice for choice in wanted if choice.when(facts)]
    if able:
        best = min(able, key=lambda choice: choice.cost(facts))
        why = "asked for" if forced else reason_to_choose(best, facts)
        return best.name, why
    if forced == "reference":
        return "reference", "asked for"
    reasons: dict[str, None] = {}  # each once
    for choice in wanted:
        if forced or not choice.on_request:
            reason = choice.reason_against(facts)
            reasons[reason] = None
    passed_over = "; ".join(reasons)
    if forced is not None:
        raise UserError(f"kernels.force: {op}={forced} cannot run here: {passed_over}; leave it out")
    return "reference", passed_over or "plain torch is the only one yet"


def reason_to_choose(choice: Choice, facts: Facts) -> str:
    note = choice.note(facts)
    return f"{choice.why} ({note})" if note else choice.why


def forced_implementations(force: Iterable[str]) -> dict[str, str]:
    """("attention=reference",) -> {"attention": "reference"}; unknown names are refused with the nearest."""
    forced: dict[str, str] = {}
    for text in force:
        op, _, name = text.partition("=")
        one_of("kernel operation (kernels.force, as op=name)", op, CATALOG)
        choices = CATALOG[op]
        names = [choice.name for choice in choices]
        wanted = current_name(name)
        forced[op] = one_of(f"implementation of {op}", wanted, ["reference", *names])
    return forced
