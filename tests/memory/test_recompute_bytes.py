"""What a recomputing model holds between forward and backward, to the byte: what the planner's tables say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.anatomy.regions import regions_of
from moefold.config.memory_regions import REBUILT_REGIONS
from moefold.config.run import Config, MemoryConfig
from moefold.memory.choose import attach_configured_policies
from moefold.model.transformer import Transformer
from moefold.plan.layer.layer_costs import count_piece
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from tests.plan.layer.test_moefold_layers import IN_FP8, SMALL, kept_by_steps, real, tables

MLA = (
    "--model.attention.kind=mla --model.attention.kv_heads=4 --model.attention.rope_dim=16 "
    "--model.attention.qk_norm=none"
)
SHARED = "--model.moe.shared_ffn=64 --model.moe.dense_layers=1"
MODELS = {
    "norms of heads": f"{SHARED} --model.attention.qk_norm=head",
    "norms over all heads": f"{SHARED} --model.attention.qk_norm=full",
    "no qk norm, partial rotary": f"{SHARED} --model.attention.qk_norm=none --model.attention.rope_dim=8",
    "latent attention": f"{SHARED} {MLA} --model.attention.q_rank=32",
    "latent attention without a query latent": f"{SHARED} {MLA}",
    "tokens ahead": f"{SHARED} --model.mtp=2",
    "latent experts, gate behind": "--model.moe.latent=48 --model.moe.gate=output",
    "biases": "--model.moe.biases=true --model.moe.activation=clamped_swiglu",
    "shared experts with a gate": f"{SHARED} --model.moe.shared_gate=true",
}
CHOICES = [
    *(name for name in REBUILT_REGIONS if name != "swap"),
    "norm,core,shared,experts",
    "norm,activation,up",
    "norm,moe",
    "layer@0,moe@1-2,norm@3",
    "sar@0-2,experts@1",
]


class MadeTensors(TorchDispatchMode):
    """The memory of every tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in [result] if isinstance(result, torch.Tensor) else tree_leaves(result):  # the latter is slow
            if isinstance(leaf, torch.Tensor):
                memory = StorageWeakRef(leaf.untyped_storage())
                self.made.setdefault(memory.cdata, memory)
        return result

    def held_bytes(self, own: set[int]) -> int:
        held = 0
        for address, memory in self.made.items():
            if not memory.expired() and address not in own:
                storage = torch.UntypedStorage._new_with_weak_ptr(address)
                held += storage.nbytes() if storage.nbytes() >= SMALL else 0
        return held


def held_after_forward(model: Transformer, config: Config) -> int:
    shape = (2, config.train.micro_batch, config.data.seq_len)
    tokens, labels = (x.clone() for x in torch.randint(256, shape, generator=torch.Generator().manual_seed(1)))
    list(tables(model))  # the angles of positions belong to the model
    with MadeTensors() as tensors:
        losses = model(tokens, labels)
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), *tables(model), tokens, labels)}
    held = tensors.held_bytes(own)
    assert losses.cross_entropy.requires_grad
    return held


def planned_to_keep(config: Config) -> float:
    model = config.model
    choices = PlanChoices(precision="fp32", device="cpu", recompute=config.memory.recompute)
    portion = make_rank_portion(config, "local", defers_wgrad=False)
    layers = [("t", layer) for layer in range(model.layers)]
    ahead = [("m", model.layers + depth) for depth in range(model.mtp)]
    kept = 0.0
    for piece, layer in [("E", 0), *layers, *ahead, ("L", 0)]:
        for step in count_piece(model, piece, layer, portion, choices).steps:
            kept += sum(tensor.bytes for tensor in step.kept_tensors if tensor.bytes >= SMALL)
    return kept


def regions_of_model(config: Config, choice: str) -> tuple[str, ...]:
    """Those of the choice that the model has."""
    present = regions_of(config.model, {})
    return tuple(entry for entry in choice.split(",") if entry.partition("@")[0] in present)


def held_and_planned(config: Config, recompute: tuple[str, ...]) -> tuple[int, float]:
    config = replace(config, memory=MemoryConfig(recompute=recompute))
    model = real(config, "fp32", "cpu")
    attach_configured_policies(model, config)
    planned = planned_to_keep(config)
    assert sum(kept_by_steps(model, config).values()) == planned, "as hooks on saved tensors count"
    return held_after_forward(model, config), planned


@cache
def without_recompute(config: Config) -> tuple[int, float]:
    return held_and_planned(config, ())


def compare(words: str, choice: str) -> None:
    """What is held falls by what the table says. Beside saved tensors a forward holds its losses and counts."""
    layers = 4 if "@" in choice else 2
    sizes = [f"--model.layers={layers}", "--data.seq_len=64", "--train.micro_batch=2"]
    config = resolve_recipe("tiny", [*words.split(), *sizes])
    regions = regions_of_model(config, choice)
    held, planned = without_recompute(config)
    held_less, planned_less = held_and_planned(config, regions)
    assert held - held_less == planned - planned_less


CASES = [(name, choice) for name in MODELS for choice in CHOICES]


@pytest.mark.parametrize(("name", "choice"), CASES)
def test_a_recomputing_model_holds_what_the_table_says(name: str, choice: str):
    compare(MODELS[name], choice)


FP8_CASES = [
    (name, recipe, choice)
    for name in ("experts as one function", "experts as a composition", "latent attention", "latents in FP8")
    for recipe in ("fp8_block", "fp8_hybrid")
    for choice in CHOICES
]


@pytest.mark.parametrize(("name", "recipe", "choice"), FP8_CASES)
def test_a_recomputing_model_in_fp8_holds_what_the_table_says(name: str, recipe: str, choice: str):
    compare(f"{IN_FP8[name]} --precision.recipe={recipe}", choice)
