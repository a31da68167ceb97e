"""A model with the weights of a Hugging Face folder: for notebooks and tests, and as the start of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.read_weights import FolderWeights, load_folder_weights
from moefold.checkpoint.live.logical_tensors import torch_dtype_text
from moefold.config.errors import one_of
from moefold.config.run import Config, ParallelConfig
from moefold.layout.axes import World, single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.model.transformer import Transformer
from moefold.observe.printer import Printer, print_nothing
from moefold.observe.trace import SpanRecorder
from moefold.pipeline.executor import Executor
from moefold.shard.gradients import Gradients
from moefold.train.assemble import build_model, choose_kernels, resolve_auto_values, resolve_context, resolve_dispatcher
from moefold.train.evaluation_config import evaluation_config, require_evaluation

WeightFiller = Callable[[Transformer], None]
MakeFiller = Callable[[Config, World], WeightFiller]


def from_hf(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu", seq_len: int = 4096
) -> Transformer:
    """The model in a folder of safetensors, ready for `logits(ids_BS)` of up to `seq_len` tokens."""
    folder = open_model_folder(Path(path))
    described = describe_model(folder)
    names = {torch_dtype: name for name, torch_dtype in DTYPES.items()}
    name = names.get(dtype, str(dtype))
    precision = one_of("precision", name, ("fp32", "bf16", "fp16", "fp64"))

    def make_filler(config: Config, world: World) -> WeightFiller:
        return starting_weights(folder.path, config, world, print_nothing)

    alone = ParallelConfig()
    world = single_rank_world(device)
    config = evaluation_config(described.model, alone, seq_len, 1)
    executor = build_to_evaluate(config, precision, world, make_filler)
    return executor.model


def build_to_evaluate(config: Config, precision: str, world: World, make_filler: MakeFiller) -> Executor:
    """This rank's part of a model in evaluation mode, with what runs it forward. `config`: an evaluation's."""
    train = replace(config.train, precision=precision)
    config = replace(config, train=train)
    config = resolve_auto_values(config, world)
    require_evaluation(config, world.size)
    config, _ = resolve_context(config, world)
    config, _ = resolve_dispatcher(config, world)
    config = without_symmetric_memory(config)
    kernels = choose_kernels(config, world)
    fill_weights = make_filler(config, world)
    model = build_model(config, world, kernels, fill_weights)
    model = model.eval()
    no_gradients = Gradients([], world)
    spans = SpanRecorder(world.rank)
    return Executor(config, model, no_gradients, world, spans)


def without_symmetric_memory(config: Config) -> Config:
    """The configuration with `dedup` for `symmetric`, which sends by it where a model is not trained: the memory of its
    rooms would be held for nothing."""
    parallel = config.parallel
    if parallel.dispatcher == "symmetric":
        parallel = replace(parallel, dispatcher="dedup")
    return replace(config, parallel=parallel)


def starting_weights(path: Path, config: Config, world: World, say: Printer) -> WeightFiller:
    """A function that fills a rank's part of the configured model with the weights of a folder."""

    def fill_from_folder(model: Transformer) -> None:
        folder = open_model_folder(path)
        described = describe_model(folder)
        for note in described.notes:
            say(note)
        family = described.family
        table = family.name_table(config.model)
        load_folder_weights(FolderWeights(folder), table, model, world)
        tensors = folder.tensors.values()
        saved_dtypes = {stored.dtype for stored in tensors}
        saved = ", ".join(sorted(saved_dtypes))
        first = next(model.parameters())
        here = torch_dtype_text(first.dtype)
        say(f"starting from {path}: {family.kind}, {len(folder.tensors)} tensors saved as {saved}, {here} here")

    return fill_from_folder
