"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Of a matrix of theirs PEFT has lora_A (rank, inputs) and lora_B (outputs, rank). Where their matrix holds several of
ours, ranks add up: A has the rows of each, B its columns, and zeros for outputs of the others. Attention is named in
target_modules, MLPs in target_parameters: PEFT takes gate_proj in target_modules for that of routed experts.

The stack of all experts is one parameter there (transformers 5): lora_A is (experts x rank, inputs), lora_B (outputs,
rank x experts). Of two such parameters of a module PEFT nests the wrappers; the first is the inner one, `base_layer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.format.boxes import whole_box
from moefold.checkpoint.hf.adapted_products import INNER, experts_module, present_name
from moefold.checkpoint.hf.adapter_folder import CONFIG_FILE, ROOT, WEIGHTS_FILE
from moefold.checkpoint.hf.merged_weights import WeightAdapter, WeightAdapters
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.piece_values import FetchBox, write_piece_values
from moefold.checkpoint.hf.write_weights import (
    PlannedTensor,
    move_into_place,
    staging_folder,
    write_json,
    write_shard_file,
)
from moefold.config.errors import UserError
from moefold.config.run import LoraConfig

ATTENTION = ".self_attn."


@dataclass
class PeftAdapter:
    """Tensors by name, the targets, and those whose rank or alpha is not that of the section `lora`."""

    lora: LoraConfig
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    modules: list[str] = field(default_factory=list[str])
    parameters: list[str] = field(default_factory=list[str])
    ranks: dict[str, int] = field(default_factory=dict[str, int])
    alphas: dict[str, float] = field(default_factory=dict[str, float])
    has_magnitudes: bool = False

    def add(self, target: str, module: str, a: Tensor, b: Tensor, rank: int, scale: float) -> None:
        """Add a target: the name of a module, or of a parameter. `module`: the name of the wrapper of its tensors."""
        targets = self.modules if ATTENTION in target else self.parameters
        parameter = target if ATTENTION in target or ".experts." in target else f"{target}.weight"
        targets.append(parameter)
        self.tensors[f"{ROOT}{module}.lora_A.weight"] = a
        self.tensors[f"{ROOT}{module}.lora_B.weight"] = b
        alpha = scale * (rank**0.5 if self.lora.rs else rank)
        if rank != self.lora.rank:
            self.ranks[parameter] = rank
        if alpha != self.lora.alpha:
            self.alphas[parameter] = alpha

    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "inference_mode": True,
            "r": self.lora.rank,
            "lora_alpha": whole_if_possible(self.lora.alpha),
            "lora_dropout": 0.0,
            "use_rslora": self.lora.rs,
            "use_dora": self.has_magnitudes,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": self.modules,
            "target_parameters": self.parameters,
            "rank_pattern": self.ranks,
            "alpha_pattern": {name: whole_if_possible(alpha) for name, alpha in self.alphas.items()},
        }


def whole_if_possible(x: float) -> float | int:
    return int(x) if x == int(x) else x


def peft_adapter(table: NameTable, adapters: WeightAdapters, lora: LoraConfig, fetch: FetchBox) -> PeftAdapter:
    """Adapters under the names of a family. Those of layers that the family's models do not have are refused."""
    refuse_layers_ahead(adapters)
    refuse_some_magnitudes(adapters)
    result = PeftAdapter(lora, has_magnitudes=lora.dora)
    for theirs, pieces in table.pieces_by_theirs.items():
        dense = [piece for piece in pieces if piece.ours in adapters and not adapters[piece.ours].is_grouped]
        if dense:
            a, b, scale = their_pair(dense, adapters, fetch)
            module = present_name(theirs.removesuffix(".weight"))
            result.add(module, module, a, b, len(a), scale)
            if lora.dora:
                result.tensors[f"{ROOT}{module}.lora_magnitude_vector"] = their_magnitude(pieces, adapters, fetch)
    by_module: dict[str, list[str]] = {}  # our weights by their module of experts
    for name, adapter in adapters.items():
        if adapter.is_grouped:
            module = experts_module(table.pieces_by_ours[name][0].theirs)
            by_module.setdefault(module, []).append(name)
    for module, names in by_module.items():
        for number, name in enumerate(names):
            is_inner = number < len(names) - 1
            wrapper = module + INNER if is_inner else module
            add_stack(result, module, wrapper, table.pieces_by_ours[name][0], adapters[name], fetch)
    return result


def refuse_layers_ahead(adapters: WeightAdapters) -> None:
    ahead = [name for name in adapters if name.startswith("ahead.")]
    if ahead:
        raise UserError(
            f"{ahead[0]} has an adapter, and models of transformers have no layers of multi-token prediction; "
            "write merged weights with --to hf, or train with lora.targets that leave ahead.* out"
        )


def refuse_some_magnitudes(adapters: WeightAdapters) -> None:
    """Refuse magnitudes beside adapters without: PEFT has DoRA for all targets, and not for parameters."""
    without = [name for name, adapter in adapters.items() if not adapter.magnitude]
    if without and len(without) < len(adapters):
        raise UserError(
            f"{without[0]} has an adapter without magnitudes, and PEFT has DoRA for all targets or for none; "
            'write merged weights with --to hf, or train with lora.targets = "*.attention.*"'
        )


def their_magnitude(pieces: list[MappedPiece], adapters: WeightAdapters, fetch: FetchBox) -> Tensor:
    """The magnitudes of the rows of one of their matrices; of rows without an adapter their lengths."""
    joined: Tensor | None = None
    for piece in pieces:
        box = piece.box_in_ours
        adapter = adapters.get(piece.ours)
        if adapter is None:
            values = torch.linalg.vector_norm(fetch(piece.ours, box), dim=-1)
        else:
            values = fetch(adapter.magnitude, box[:-1])
        column = piece.with_inputs(1)
        if joined is None:
            joined = values.new_empty(column.their_shape)
        write_piece_values(column, values.unsqueeze(-1), joined)
    assert joined is not None
    return joined.flatten()


def their_pair(
    pieces: list[MappedPiece], adapters: WeightAdapters, fetch: FetchBox
) -> tuple[Tensor, Tensor, float]:  # fmt: skip
    """A, B and the scale of one of their matrices, from the adapters of our weights that it holds."""
    ours = list(dict.fromkeys(piece.ours for piece in pieces))
    scale = adapters[ours[0]].spec.scale
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    for name in ours:
        adapter = adapters[name]
        of_name = [piece for piece in pieces if piece.ours == name]
        box = adapter.box_of_a(of_name[0].box_in_ours)
        rows.append(fetch(adapter.a, box).flatten(0, -2))
        b = their_outputs(of_name, adapter, fetch)
        columns.append(b * (adapter.spec.scale / scale))
    return torch.cat(rows), torch.cat(columns, 1), scale


def their_outputs(pieces: Iterable[MappedPiece], adapter: WeightAdapter, fetch: FetchBox) -> Tensor:
    """B with their order of outputs: the pieces of the weight, with the rank in place of inputs."""
    joined: Tensor | None = None
    for piece in pieces:
        of_b = piece.with_inputs(adapter.spec.rank)
        values = fetch(adapter.b, of_b.box_in_ours)
        if joined is None:
            joined = values.new_zeros(of_b.their_shape)
        write_piece_values(of_b, values, joined)
    assert joined is not None
    return joined


def add_stack(
    result: PeftAdapter, module: str, wrapper: str, piece: MappedPiece, adapter: WeightAdapter, fetch: FetchBox
) -> None:
    """The adapters of all experts."""
    spec = adapter.spec
    parameter = "down_proj" if is_down(adapter) else "gate_up_proj"
    a_eri, b_eor = stacked_adapter(piece, adapter, fetch)
    b_ore = b_eor.permute(1, 2, 0)
    a = a_eri.flatten(0, 1)
    b = b_ore.flatten(1).contiguous()
    result.add(f"{module}.{parameter}", wrapper, a, b, spec.rank, spec.scale)


def stacked_adapter(piece: MappedPiece, adapter: WeightAdapter, fetch: FetchBox) -> tuple[Tensor, Tensor]:
    """A (experts, rank, inputs) and B (experts, outputs, rank), outputs in their order."""
    spec = adapter.spec
    experts = spec.experts
    a = fetch(adapter.a, whole_box((experts, spec.rank, spec.product.inputs)))
    if len(piece.their_shape) == 3:  # (experts, inputs, outputs) on their side
        b_ero = their_outputs([piece], adapter, fetch)
        return a, b_ero.mT
    outputs = spec.product.outputs
    gate_and_up = (2, outputs // 2)
    shape = (outputs,) if is_down(adapter) else gate_and_up
    b = fetch(adapter.b, whole_box((experts, *shape, spec.rank)))
    return a, b.flatten(1, -2)


def is_down(adapter: WeightAdapter) -> bool:
    return adapter.spec.product.place.endswith("down_product")


def write_adapter(out: Path, adapter: PeftAdapter, overwrite: bool) -> list[PlannedTensor]:
    """Write both files, under a temporary name until they are complete."""
    planned = [PlannedTensor(name, tuple(x.shape), x.dtype) for name, x in adapter.tensors.items()]
    with staging_folder(out, planned, overwrite) as staging:
        write_shard_file(staging / WEIGHTS_FILE, planned, iter(adapter.tensors.items()))
        write_json(staging / CONFIG_FILE, adapter.config())
        move_into_place(staging, out)
    return planned
