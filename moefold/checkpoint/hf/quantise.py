"""Quantisation of exported weights to 128 x 128 FP8 blocks, as DeepSeek-V3 has them.

    "X.weight"              F8_E4M3 (N, K)
    "X.weight_scale_inv"    F32 (N / 128, K / 128), rounded up; the weight is bytes * scale

The projections of attention, dense MLPs, shared and routed experts are quantised: the default scope of
`precision.recipe`. Embedding, head, router, norms and the projection of an MTP layer's input are bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moefold.anatomy.products import weights_in_scope
from moefold.checkpoint.hf.dequantise import FP8_SCALE_SUFFIX
from moefold.checkpoint.hf.family import ModelFamily
from moefold.checkpoint.hf.name_table import NameTable
from moefold.checkpoint.hf.quantization_config import FP8_BLOCK
from moefold.checkpoint.hf.table_parts import HEAD
from moefold.config.errors import UserError
from moefold.config.run import ModelConfig
from moefold.kernels.quantise.fp8 import E4M3, ScaleRule
from moefold.kernels.quantise.quantise_weight import quantise_weight

FP8_DTYPE = E4M3.dtype
BESIDE_FP8 = torch.bfloat16  # dtype of the tensors that are not quantised
WEIGHT_SUFFIX = ".weight"


def quantised_names(family: ModelFamily, table: NameTable, model: ModelConfig) -> set[str]:
    """The names of their tensors that FP8 blocks quantise. Refused if one is no matrix."""
    scope = weights_in_scope(model)
    names: set[str] = set()
    for piece in table.pieces:
        if piece.ours not in scope:
            continue
        if len(piece.their_groups) != 2:
            shape = list(piece.their_shape)
            raise UserError(
                f'"{piece.theirs}" of a {family.kind} model has the shape {shape}; FP8 blocks are of matrices, '
                "as DeepSeek-V3 has them; write it with --dtype bf16, or choose another family with --family"
            )
        names.add(piece.theirs)
    return names


def plain_modules(family: ModelFamily, table: NameTable) -> list[str]:
    """The linear layers of their model that FP8 blocks leave out; none where those are the head alone, which
    transformers leaves out if no list names others."""
    if not family.gates:
        return []
    weights = [name for name in table.written if name.endswith(WEIGHT_SUFFIX)]
    modules = [name.removesuffix(WEIGHT_SUFFIX) for name in weights]
    endings = tuple(f".{gate}" for gate in family.gates)
    gates = [module for module in modules if module.endswith(endings)]
    return [HEAD.removesuffix(WEIGHT_SUFFIX), *gates]


def block_scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def quantised_pair(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The bytes of a weight, and its scales, under their names."""
    stack = weight[None]
    quantised = quantise_weight(stack, "block", ScaleRule()).forward
    yield name, quantised.values[0]
    yield name + FP8_SCALE_SUFFIX, quantised.scales[0]
