"""When a parameter has all of its gradients: which stages use it, and where in a program the last of them comes."""

from __future__ import annotations

from collections.abc import Sequence

from moefold.layout.declare import declared_parameters
from moefold.model.transformer import Transformer
from moefold.schedule.program import Slot


def stages_using_parameters(model: Transformer) -> dict[str, tuple[set[int], bool]]:
    """For each parameter, the stages that use it, and whether its gradient may come with W instead of D."""
    places: dict[str, set[int]] = {}
    for stage in model.stages:
        prefixes = [*(f"blocks.{n}." for n in stage.layers), *(f"ahead.{depth - 1}." for depth in stage.ahead)]
        prefixes += ["embedding."] if stage.uses_embedding or (stage.predicts and model.model.tied_head) else []
        prefixes += ["head."] if stage.predicts else ["head.norm."] if stage.uses_final_norm else []
        for parameter in declared_parameters(model):
            if parameter.name.startswith(tuple(prefixes)):
                places.setdefault(parameter.name, set()).add(stage.number)
    return {name: (stages, may_defer_weight_grad(name)) for name, stages in places.items()}


def may_defer_weight_grad(name: str) -> bool:
    """Matrices of linear layers and experts inside blocks; not norms, biases, routers, embedding and head."""
    inside = name.startswith(("blocks.", "ahead."))
    matrix = name.endswith((".weight", ".gate_up", ".down")) and not name.endswith(("norm.weight", "router.weight"))
    return inside and matrix


def last_gradient_slots(slots: Sequence[Slot], users: dict[str, tuple[set[int], bool]]) -> dict[int, set[str]]:
    """By number of slot: the parameters that get their last gradient there."""
    last: dict[tuple[str, int], int] = {}
    for number, slot in enumerate(slots):
        for op in slot:
            last[op.kind, op.stage] = number
    found: dict[int, set[str]] = {}
    for name, (stages, waits) in users.items():
        kinds = "DW" if waits else "D"
        where = [last[kind, stage] for stage in stages for kind in kinds if (kind, stage) in last]
        if where:
            found.setdefault(max(where), set()).add(name)
    return found
