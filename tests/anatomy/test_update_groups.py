"""Groups of parameters are those that the optimizer of a run makes: rule, rate, decay, parameters, what is frozen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from moefold.anatomy.update_groups import frozen_parameters, update_groups
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.optim.adamw import AdamW
from moefold.optim.muon import Muon
from moefold.optim.parameter_groups import ParameterGroups
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import build_model, choose_kernels
from moefold.train.share_out import choose_trained_parameters

ON_CPU = ["--train.precision", "fp32", "--train.device", "cpu"]
MUON = ["--optim.rule", "muon"]
DORA = ["--lora.rank", "4", "--lora.dora", "true", "--model.moe.balance.bias_rate", "0"]
ROUTERS = "*.router.weight: lr=0.5 decay=0"
BY_NAME = f"*.experts.*: rule=muon lr=2,{ROUTERS},*norm*: frozen"
BY_LAYER = f"embedding.*: frozen,blocks.0.*: lr=0.1,{ROUTERS},head.*: rule=adamw"
OF_ADAPTERS = "*.lora.b: lr=16,blocks.0.*: frozen,*.up_product.lora.a: decay=0.3"
CASES = {
    "no entries": ("tiny", []),
    "muon and the rest": ("tiny", [*MUON, "--model.moe.shared_ffn", "32", "--model.moe.shared_gate", "true"]),
    "muon by name": ("tiny", ["--optim.groups", BY_NAME]),
    "layers by rate": ("gpt-oss-20b-tiny", [*MUON, "--optim.groups", BY_LAYER]),
    "layers ahead": ("tiny", ["--model.mtp", "1", "--optim.groups", "ahead.*: lr=3,*.attention.*: frozen"]),
    "adapters": ("tiny", [*DORA, *MUON, "--optim.groups", OF_ADAPTERS]),
}


class BuiltModel:
    """The declared parameters that can be trained, and the rules that update them."""

    def __init__(self, config: Config):
        world = single_rank_world()
        kernels = choose_kernels(config, world)
        model = build_model(config, world, kernels)
        self.trainable = [p for p in declared_parameters(model) if p.tensor.requires_grad]
        self.groups = ParameterGroups(config.optim, kernels)
        choose_trained_parameters(model, world, self.groups)
        self.lr = config.optim.lr

    def rows(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for parameter in self.trainable:
            row = self.options(parameter)
            key = (row["pattern"], row["rule"])
            row = found.setdefault(key, {**row, "parameters": 0, "decaying": 0})
            size = parameter.tensor.numel()
            row["parameters"] += size
            row["decaying"] += size * (parameter.tensor.requires_grad and parameter.declaration.decays)
        return list(found.values())

    def options(self, parameter: DeclaredParameter) -> dict[str, Any]:
        pattern = self.groups.matching_pattern(parameter.name)
        if not parameter.tensor.requires_grad:
            return {"pattern": pattern, "rule": "", "lr": 0.0, "decay": 0.0}
        rule, factor = self.groups.rules[self.groups.group_of(parameter).name]
        assert isinstance(rule, AdamW | Muon)
        decay = rule.decay if isinstance(rule, Muon) else rule.options.decay
        return {"pattern": pattern, "rule": type(rule).__name__.lower(), "lr": factor * self.lr, "decay": decay}


def in_order(groups: list[dict[str, Any]]) -> list[list[Any]]:
    return sorted([list(group.values()) for group in groups], key=str)


@pytest.mark.parametrize("case", CASES)
def test_groups_are_those_of_the_optimizer(case: str):
    recipe, words = CASES[case]
    config = resolve_recipe(recipe, [*ON_CPU, *words])
    model = BuiltModel(config)
    found = update_groups(config)
    assert in_order([asdict(group) for group in found]) == in_order(model.rows())
    named = [entry.pattern for entry in model.groups.entries]
    assert [*dict.fromkeys(group.pattern for group in found)] == [*named, ""]
    frozen = [parameter for parameter in model.trainable if not parameter.tensor.requires_grad]
    assert sum(frozen_parameters(config).values()) == len(frozen)


def test_layers_are_told_once_and_an_entry_without_parameters_of_its_own_too():
    config = resolve_recipe("tiny", ["--optim.groups", "*.router.weight: frozen,blocks.*.moe.router.weight: lr=2"])
    assert frozen_parameters(config) == {"blocks.*.moe.router.weight": config.model.layers}
    assert [(group.pattern, group.parameters) for group in update_groups(config)][1] == (
        "blocks.*.moe.router.weight",
        0,
    )


@pytest.mark.parametrize("words", [[], DORA])
def test_an_entry_that_gives_muon_what_is_no_matrix_is_refused_as_in_a_run(words: list[str]):
    pattern = "*.lora.b" if words else "*norm.weight"
    config = resolve_recipe("tiny", [*ON_CPU, *words, "--optim.groups", f"{pattern}: rule=muon"])
    for refused in (lambda: BuiltModel(config).rows(), lambda: update_groups(config)):
        with pytest.raises(UserError, match=r"optim\.groups: .* gives .* to a rule for matrices, but its shape is \("):
            refused()
