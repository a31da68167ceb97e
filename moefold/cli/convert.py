"""`moefold convert`: weights as a folder that `transformers` loads, of a run, or of a dense model made sparse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class ConvertOptions:
    """Write weights in the form that Hugging Face's libraries load: safetensors, config.json, tokenizer files. The
    source is a run, one of its checkpoints, or a folder of Hugging Face weights."""

    source: tyro.conf.Positional[Path]
    """A run, a checkpoint, or a folder with config.json and safetensors."""
    out: tyro.conf.Positional[Path]
    """The folder to write; it must be empty, or not be there."""
    to: Literal["hf"] = "hf"
    """The form to write: hf."""
    family: str | None = None
    """Which family of models to write, such as qwen3_moe; by default the one that has a place for everything."""
    dtype: Literal["as_saved", "fp32", "bf16", "fp16"] = "as_saved"
    """What weights are written as; as_saved: as they are, and bf16 what was quantised."""
    upcycle: str | None = None
    """Make a dense model one with experts that computes the same: E8T2 (8 copies, 2 chosen), E8G2T2 (cut in 2)."""
    seed: int = 1
    """Of the routers that upcycling adds."""
    overwrite: bool = False
    """Replace the model in a folder that is not empty."""


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(ConvertOptions, argv, "convert", config_keys=False)

    from moefold.train.convert import ConvertRequest, convert_weights  # torch, from here on

    wishes = ConvertRequest(options.family, options.dtype, options.upcycle, options.seed, options.overwrite)
    convert_weights(options.source, options.out, wishes, print)
    return 0
