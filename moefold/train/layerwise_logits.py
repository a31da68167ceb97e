"""Logits of a model folder, computed with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

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
    """The embedding, each layer, and the head as a stage each. MTP layers take no part in logits."""
    none = range(0)
    after_last = range(model.layers, model.layers)
    yield Stage(0, True, none, none, False, 0)
    for layer in range(model.layers):
        only = range(layer, layer + 1)
        yield Stage(layer + 1, False, only, none, False, 0)
    yield Stage(model.layers + 1, False, after_last, none, True, 0)


@torch.no_grad()
def logits_by_layer(folder: ModelFolder, ids_BS: Tensor, precision: str = "fp32") -> Tensor:
    """Logits (B, S, V). Missing and wrong weights are refused before the first layer."""
    described = describe_model(folder)
    model = described.model
    world = single_rank_world()
    train = TrainConfig(device="cpu", precision=precision)  # pyright: ignore[reportArgumentType]
    data = DataConfig(seq_len=ids_BS.shape[1])
    config = Config(model=model, data=data, train=train)
    kernels = choose_kernels(config, world)
    parts = make_model_parts(config, world, kernels)
    weights = FolderWeights(folder)
    table = described.family.name_table(model)
    check_names_and_shapes(weights, table)
    carry = None
    for stage in layer_stages(model):
        with default_dtype(DTYPES[precision]):
            layer = Transformer(model, parts, [stage])
        layer.eval()
        fill_local_model(weights, table, layer)
        if carry is None:
            carry = layer.begin(ids_BS)
        carry = run_step_sequence(layer.body(stage), carry)
        if stage.predicts:
            return layer.logits_from_carry(carry)
    raise AssertionError("the last stage predicts")
