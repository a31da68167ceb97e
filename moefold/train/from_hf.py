"""A model from a folder of Hugging Face weights: for a run to start from, and for notebooks and tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.read_weights import FolderWeights, load_folder_weights
from moefold.config.errors import one_of
from moefold.config.rules import check_config
from moefold.config.run import Config, DataConfig, TrainConfig
from moefold.layout.axes import World, single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.model.transformer import Transformer
from moefold.train.assemble import build_model, choose_kernels, resolve_auto_values

WeightFiller = Callable[[Transformer], None]


def from_hf(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu", seq_len: int = 4096
) -> Transformer:
    """The model in a folder of safetensors, ready for `logits(ids_BS)` of up to `seq_len` tokens."""
    folder = open_model_folder(Path(path))
    described = describe_model(folder)
    names = {torch_dtype: name for name, torch_dtype in DTYPES.items()}
    precision = one_of("precision", names.get(dtype, str(dtype)), ("fp32", "bf16", "fp64"))
    train = TrainConfig(device="cpu" if device == "cpu" else "cuda", precision=precision)  # pyright: ignore[reportArgumentType]
    data = DataConfig(seq_len=seq_len, tokenizer=str(folder.path / "tokenizer.json"))  # which nobody opens here
    world = single_rank_world(device)
    config = check_config(resolve_auto_values(Config(model=described.model, data=data, train=train), world), 1)
    start = starting_weights(folder.path, config, world, lambda note: None)
    return build_model(config, world, choose_kernels(config, world), start).eval()


def starting_weights(path: Path, config: Config, world: World, say: Callable[[str], None]) -> WeightFiller:
    """Fills what a rank holds of a configured model with the weights of a folder."""

    def fill_from_folder(model: Transformer) -> None:
        folder = open_model_folder(path)
        described = describe_model(folder)
        for note in described.notes:
            say(note)
        load_folder_weights(FolderWeights(folder), described.family.name_table(config.model), model, world)
        saved = ", ".join(sorted({stored.dtype for stored in folder.tensors.values()}))
        here = str(next(model.parameters()).dtype).removeprefix("torch.")
        tensors = f"{len(folder.tensors)} tensors saved as {saved}, {here} here"
        say(f"starting from {path}: {described.family.kind}, {tensors}")

    return fill_from_folder
