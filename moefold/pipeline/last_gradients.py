"""The slot of a program in which a parameter gets its last gradient: from then on its bucket may be reduced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from moefold.anatomy.stage_contents import Stage
from moefold.layout.declare import declared_parameters
from moefold.model.moe.clones import ExpertClones
from moefold.model.moe.layer import MoeSublayer
from moefold.model.transformer import Transformer
from moefold.schedule.program import Slot

ParameterUse = tuple[set[int], bool]  # the stages, and whether the gradient may come with W
StagesUsing = Mapping[str, ParameterUse]


def stages_using_parameters(model: Transformer) -> StagesUsing:
    """For each trained parameter, the stages that use it, and whether its gradient may come with W instead of D."""
    has_tied_head = model.model.tied_head
    stages_of = defaultdict[str, set[int]](set)
    for stage in model.stages:
        prefixes = tuple(parameter_prefixes(stage, has_tied_head))
        for parameter in declared_parameters(model):
            name = parameter.name
            is_trained = parameter.tensor.requires_grad
            if is_trained and name.startswith(prefixes):
                stages_of[name].add(stage.number)
    users: dict[str, ParameterUse] = {}
    for name, stages in stages_of.items():
        users[name] = stages, may_defer_weight_grad(name)
    return users


def parameter_prefixes(stage: Stage, tied_head: bool) -> Iterator[str]:
    """The beginnings of the names of all parameters that a stage uses."""
    for layer in stage.layers:
        yield f"blocks.{layer}."
    for depth in stage.ahead:
        yield f"ahead.{depth - 1}."
    reads_as_head = stage.predicts and tied_head
    if stage.uses_embedding or reads_as_head:
        yield "embedding."
    if stage.predicts:
        yield "head."
    elif stage.uses_final_norm:
        yield "head.norm."


def may_defer_weight_grad(name: str) -> bool:
    """Whether the gradient is a deferrable product: matrices of linear layers and experts inside blocks are; norms,
    biases, routers, embedding and head are not."""
    inside_block = name.startswith(("blocks.", "ahead."))
    is_weight = name.endswith((".weight", ".gate_up", ".up", ".down", ".lora.a", ".lora.b"))
    is_excluded = name.endswith(("norm.weight", "router.weight"))
    return inside_block and is_weight and not is_excluded


def parameters_with_several_gradients(model: Transformer) -> set[str]:
    """The parameters that several steps of a stage may use, each with a gradient for it: the embedding, which layers of
    multi-token prediction look up again and a tied head multiplies with; experts that are cloned, and those that
    compute row chunks."""
    several: set[int] = set()
    for module in model.modules():
        if isinstance(module, ExpertClones):
            several.update(map(id, module.borrowed))
        elif isinstance(module, MoeSublayer) and module.row_chunks > 1:
            several.update(map(id, module.experts.parameters()))
    names: set[str] = set()
    for parameter in declared_parameters(model):
        gets_several = id(parameter.tensor) in several
        if gets_several or parameter.name.startswith("embedding."):
            names.add(parameter.name)
    return names


def last_gradient_slots(slots: Sequence[Slot], users: StagesUsing) -> dict[int, set[str]]:
    """By slot number: the parameters that get their last gradient there."""
    last_slot: dict[tuple[str, int], int] = {}
    for number, slot in enumerate(slots):
        for op in slot:
            last_slot[op.kind, op.stage] = number
    finished = defaultdict[int, set[str]](set)
    for name, (stages, may_defer) in users.items():
        kinds = "DW" if may_defer else "D"
        last = -1
        for op in product(kinds, stages):
            number = last_slot.get(op, -1)
            last = max(last, number)
        if last >= 0:
            finished[last].add(name)
    return finished
