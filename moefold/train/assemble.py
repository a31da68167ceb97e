"""The only place where a configuration becomes objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moefold.config.rules import check
from moefold.config.run import Config
from moefold.data.loader import Loader
from moefold.data.tokenizer import Tokenizer, load_tokenizer
from moefold.data.tokens import load_corpus
from moefold.kernels.bind import Kernels, bind
from moefold.kernels.catalog import facts_of, precision_on
from moefold.kernels.registry import DTYPES
from moefold.layout.axes import World
from moefold.model.initialise import initialise
from moefold.model.transformer import Transformer
from moefold.optim.adamw import AdamW
from moefold.shard.buckets import fill_buckets
from moefold.shard.gradients import Gradients


@dataclass
class Run:
    """Everything a training run works with. `step` counts finished steps."""

    config: Config
    world: World
    out: Path
    tokenizer: Tokenizer
    loader: Loader
    validation: Loader
    model: Transformer
    gradients: Gradients
    optimizer: AdamW
    step: int = 0


def assemble(config: Config, world: World, out: Path) -> Run:
    config = check(settled(config, world), world.size)
    torch.manual_seed(config.train.seed)
    tokenizer = load_tokenizer(config.data.tokenizer)
    loader, validation = make_loaders(config, tokenizer, world)
    kernels = choose_kernels(config, world)
    model = build_model(config, world.device, kernels)
    buckets = fill_buckets(model)
    return Run(
        config=config,
        world=world,
        out=out,
        tokenizer=tokenizer,
        loader=loader,
        validation=validation,
        model=model,
        gradients=Gradients(buckets, world),
        optimizer=AdamW(buckets, config.optim, kernels),
    )


def settled(config: Config, world: World) -> Config:
    """The configuration with every `auto` replaced by what it means here."""
    device = world.device.type
    return replace(config, train=replace(config.train, device=device, precision=precision_on(device, config)))


def make_loaders(config: Config, tokenizer: Tokenizer, world: World) -> tuple[Loader, Loader]:
    corpus = load_corpus(config.data, tokenizer, config.model.vocab)
    c, dp = config, world.axis("dp")
    train = Loader(corpus.train, c.data.seq_len, c.train.global_batch, c.train.seed, dp, world.device)
    held_out = Loader(corpus.held_out, c.data.seq_len, c.train.validate_sequences, 0, dp, world.device)
    return train, held_out


def choose_kernels(config: Config, world: World) -> Kernels:
    capability = torch.cuda.get_device_capability(world.device) if world.device.type == "cuda" else (0, 0)
    facts = facts_of(config, world.device.type, config.train.precision, capability)
    return bind(facts, config.kernels.force)


def build_model(config: Config, device: torch.device, kernels: Kernels) -> Transformer:
    """The model on its device in its precision, initialised by name and seed."""
    with device, default_dtype(DTYPES[config.train.precision]):
        model = Transformer(config.model, config.data.seq_len, kernels)
    initialise(model, config.train.seed)
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
