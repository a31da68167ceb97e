"""Adapters in PEFT's format with a pair for every matrix of every expert, as vLLM and SGLang read them.

Names are those of matrices in files of weights: `model.layers.0.mlp.experts.7.gate_proj.lora_A.weight`. Readers know
one rank and one scale: narrower pairs have rows and columns of zeros, and other scales are in B. Where one matrix of a
layer's experts has an adapter, all have a pair, some of zeros, since vLLM stacks them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from moefold.checkpoint.hf.adapted_products import experts_module
from moefold.checkpoint.hf.adapter_folder import ROOT
from moefold.checkpoint.hf.merged_weights import WeightAdapters
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.peft_folder import PeftAdapter, refuse_layers_ahead, their_pair
from moefold.checkpoint.hf.piece_values import FetchBox
from moefold.config.errors import UserError
from moefold.config.run import LoraConfig

EXPERT = ".experts."
Pair = tuple[Tensor, Tensor, float]


def peft_adapter_by_expert(table: NameTable, adapters: WeightAdapters, fetch: FetchBox) -> PeftAdapter:
    """Adapters under the names of a family whose files have each expert's matrices by themselves."""
    refuse_layers_ahead(adapters)
    if any(adapter.magnitude for adapter in adapters.values()):
        raise UserError("adapters have magnitudes (DoRA), which vLLM and SGLang do not read; merge them with --to hf")
    pairs: dict[str, Pair] = {}
    for theirs, pieces in table.pieces_by_theirs.items():
        adapted = [piece for piece in pieces if piece.ours in adapters]
        if adapted:
            refuse_stacked_experts(theirs, pieces)
            pairs[theirs] = their_pair(adapted, adapters, fetch)
    complete_experts(table, pairs)
    rank = max(len(a) for a, _, _ in pairs.values())
    scale, alpha = common_scale(pairs, rank)
    result = PeftAdapter(LoraConfig(rank=rank, alpha=alpha))
    for theirs, (a, b, own) in pairs.items():
        module = theirs.removesuffix(".weight")
        missing = rank - len(a)
        result.tensors[f"{ROOT}{module}.lora_A.weight"] = pad(a, (0, 0, 0, missing))
        result.tensors[f"{ROOT}{module}.lora_B.weight"] = pad(b * (own / scale), (0, missing))
    modules = {theirs.removesuffix(".weight").rpartition(".")[2] for theirs in pairs}
    result.modules = sorted(modules)
    return result


def refuse_stacked_experts(theirs: str, pieces: list[MappedPiece]) -> None:
    if len(pieces[0].their_shape) == 3:
        raise UserError(
            f"{theirs} is one tensor for all experts in this family, whose files have no names of single experts; "
            "write the adapters with --to peft"
        )


def complete_experts(table: NameTable, pairs: dict[str, Pair]) -> None:
    """Add pairs of zeros for the other matrices of experts that have one with an adapter."""
    a_few = {experts_module(theirs): pair for theirs, pair in pairs.items() if EXPERT in theirs}
    for theirs, pieces in table.pieces_by_theirs.items():
        if EXPERT not in theirs or theirs in pairs or experts_module(theirs) not in a_few:
            continue
        like, _, scale = a_few[experts_module(theirs)]
        outputs, inputs = pieces[0].their_shape
        pairs[theirs] = like.new_zeros(1, inputs), like.new_zeros(outputs, 1), scale


def common_scale(pairs: dict[str, Pair], rank: int) -> tuple[float, int]:
    """A scale for all pairs, and its alpha, a whole number as readers expect it."""
    _, _, scale = next(iter(pairs.values()))
    alpha = scale * rank
    if alpha == int(alpha):
        return scale, int(alpha)
    return 1.0, rank
