"""The logits of a model in a folder, computed with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moefold.anatomy.stage_contents import Stage
from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import ModelFolder
from moefold.checkpoint.hf.read_weights import FolderWeights, check_names_and_shapes, fill_local_model
from moefold.config.run import Config, DataConfig, ModelConfig, TrainConfig
from moefold.layout.axes import single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.model.steps import run_step_sequence
from moefold.model.transformer import Transformer
from moefold.train.assemble import choose_kernels, default_dtype, make_model_parts


def layer_stages(model: ModelConfig) -> Iterator[Stage]:
    """Embedding, each layer, head: a stage each. Layers that look further ahead take no part in logits."""
    yield Stage(0, True, range(0), range(0), False, 0)
    for layer in range(model.layers):
        yield Stage(layer + 1, False, range(layer, layer + 1), range(0), False, 0)
    yield Stage(model.layers + 1, False, range(model.layers, model.layers), range(0), True, 0)


@torch.no_grad()
def logits_by_layer(folder: ModelFolder, ids_BS: torch.Tensor, precision: str = "fp32") -> torch.Tensor:
    """(B, S, V). Weights that are missing or wrong are refused before the first layer."""
    described, world = describe_model(folder), single_rank_world()
    train = TrainConfig(device="cpu", precision=precision)  # pyright: ignore[reportArgumentType]
    config = Config(model=described.model, data=DataConfig(seq_len=ids_BS.shape[1]), train=train)
    choices = make_model_parts(config, world, choose_kernels(config, world))
    weights, table = FolderWeights(folder), described.family.name_table(described.model)
    check_names_and_shapes(weights, table)
    carry = None
    for stage in layer_stages(described.model):
        with default_dtype(DTYPES[precision]):
            part = Transformer(described.model, choices, [stage]).eval()
        fill_local_model(weights, table, part)
        carry = run_step_sequence(part.body(stage), carry or part.begin(ids_BS))
        if stage.predicts:
            return part.logits_from_carry(carry)
    raise AssertionError("the last stage predicts")
