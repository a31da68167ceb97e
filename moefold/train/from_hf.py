"""A model with the weights of a Hugging Face folder: for notebooks and tests, and as the start of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.read_weights import FolderWeights, load_folder_weights
from moefold.checkpoint.live.logical_tensors import torch_dtype_text
from moefold.config.errors import one_of
from moefold.config.rules import check_config
from moefold.config.run import Config, DataConfig, ModelConfig, TrainConfig
from moefold.layout.axes import World, single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.model.transformer import Transformer
from moefold.observe.printer import Printer, print_nothing
from moefold.train.assemble import build_model, choose_kernels, resolve_auto_values

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

    return build_to_evaluate(described.model, precision, device, seq_len, make_filler)


def build_to_evaluate(
    model: ModelConfig, precision: str, device: str, seq_len: int, make_filler: MakeFiller
) -> Transformer:
    """A model on one rank, in evaluation mode. The configuration is as a run would have it, so that kernels are chosen
    and rules checked in the same way."""
    kind = "cpu" if device == "cpu" else "cuda"
    train = TrainConfig(device=kind, precision=precision)  # pyright: ignore[reportArgumentType]
    data = DataConfig(seq_len=seq_len, tokenizer="tokenizer.json")  # not opened here
    config = Config(model=model, data=data, train=train)
    world = single_rank_world(device)
    config = resolve_auto_values(config, world)
    config = check_config(config, 1)
    kernels = choose_kernels(config, world)
    fill_weights = make_filler(config, world)
    built = build_model(config, world, kernels, fill_weights)
    return built.eval()


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
