"""`moefold convert`: weights of a run, or of an upcycled dense model, as a folder that `transformers` loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from moefold.config.errors import UserError
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class ConvertOptions:
    """Write weights in the form that Hugging Face's libraries load: safetensors, config.json, tokenizer files. The
    source is a run, one of its checkpoints, or a folder of Hugging Face weights."""

    source: tyro.conf.Positional[Path]
    """A run, a checkpoint, or a folder with config.json and safetensors."""
    out: tyro.conf.Positional[Path]
    """The folder to write; it must be empty or absent."""
    to: Literal["hf", "peft", "peft_by_expert"] = "hf"
    """The form to write: hf, a model, with adapters merged into its weights; peft, the adapters of a LoRA run alone;
    peft_by_expert, the same with a pair for each expert's matrix, as vLLM and SGLang read them."""
    merge: bool = False
    """Merge adapters into the weights, which the form hf does with or without this word; other forms refuse it."""
    family: str | None = None
    """The model family to write, such as qwen3_moe; by default the one that can hold every tensor."""
    dtype: Literal["as_saved", "fp32", "bf16", "fp16", "fp8_block"] = "as_saved"
    """Data type of the written weights; as_saved: unchanged, and bf16 for quantised ones; fp8_block: 128 x 128 blocks
    as in DeepSeek-V3, bf16 for embedding, head, routers and norms."""
    upcycle: str | None = None
    """Turn a dense model into an MoE model that computes the same: E8T2 (8 copies, top 2), E8G2T2 (each cut in 2)."""
    seed: int = 1
    """Random seed of the routers that upcycling adds."""
    overwrite: bool = False
    """Replace the model in a folder that is not empty."""


FORM = CommandForm("convert", ConvertOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    if options.merge and options.to != "hf":
        raise UserError(f"--merge writes a whole model, and --to {options.to} adapters alone; leave out one of the two")

    from moefold.train.convert import ConvertRequest, convert_adapters, convert_weights  # torch, from here on

    request = ConvertRequest(options.family, options.dtype, options.upcycle, options.seed, options.overwrite)
    if options.to == "hf":
        convert_weights(options.source, options.out, request, print)
    else:
        convert_adapters(options.source, options.out, request, options.to == "peft_by_expert", print)
    return 0
