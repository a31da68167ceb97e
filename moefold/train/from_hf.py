"""A model from a folder of Hugging Face weights: for a run to start from, and for notebooks and tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from moefold.checkpoint.hf.config import describe
from moefold.checkpoint.hf.folder import open_folder
from moefold.checkpoint.hf.read import Weights, load
from moefold.config.refused import choose
from moefold.config.rules import check
from moefold.config.run import Config, DataConfig, TrainConfig
from moefold.kernels.registry import DTYPES
from moefold.layout.axes import World, alone
from moefold.model.transformer import Transformer
from moefold.train.assemble import build_model, choose_kernels, settled

Starting = Callable[[Transformer], None]


def from_hf(
    path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu", seq_len: int = 4096
) -> Transformer:
    """The model in a folder of safetensors, ready for `logits(ids_BS)` of up to `seq_len` tokens."""
    folder = open_folder(Path(path))
    described = describe(folder)
    names = {torch_dtype: name for name, torch_dtype in DTYPES.items()}
    precision = choose("precision", names.get(dtype, str(dtype)), ("fp32", "bf16", "fp64"))
    train = TrainConfig(device="cpu" if device == "cpu" else "cuda", precision=precision)  # pyright: ignore[reportArgumentType]
    data = DataConfig(seq_len=seq_len, tokenizer=str(folder.path / "tokenizer.json"))  # which nobody opens here
    world = alone(device)
    config = check(settled(Config(model=described.model, data=data, train=train), world), 1)
    start = starting_weights(folder.path, config, world, lambda note: None)
    return build_model(config, world, choose_kernels(config, world), start).eval()


def starting_weights(path: Path, config: Config, world: World, say: Callable[[str], None]) -> Starting:
    """Fills what a rank holds of a configured model with the weights of a folder."""

    def fill(model: Transformer) -> None:
        folder = open_folder(path)
        described = describe(folder)
        for note in described.notes:
            say(note)
        load(Weights(folder), described.family.table(config.model), model, world)
        saved = ", ".join(sorted({stored.dtype for stored in folder.tensors.values()}))
        here = str(next(model.parameters()).dtype).removeprefix("torch.")
        tensors = f"{len(folder.tensors)} tensors saved as {saved}, {here} here"
        say(f"starting from {path}: {described.family.kind}, {tensors}")

    return fill
