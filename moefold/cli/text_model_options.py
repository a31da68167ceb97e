"""Options of commands that load the model and the tokenizer of a run or of a Hugging Face folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from moefold.config.errors import UserError


@dataclass(frozen=True)
class TextModelOptions:
    source: tyro.conf.Positional[Path]
    """A run, a checkpoint, or a folder with config.json, safetensors and tokenizer.json."""
    seq_len: int = 4096
    """Tokens of the longest sequence, an answer included; at most the model's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: the GPU, or the CPU where torch sees no GPU."""
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """Data type of weights and products; auto: bf16 on a GPU, fp32 on a CPU."""
    nproc: int = 1
    """How many ranks to start on this machine. Their layout is the run's own, changed by --parallel.ep 4 and other keys
    of that section; that of a folder is given by such keys alone."""

    def require_source(self) -> None:
        if not self.source.exists():
            raise UserError(f"{self.source} does not exist; expected a run, a checkpoint or a Hugging Face folder")

    def load_arguments(self) -> dict[str, Any]:
        """Of `load_text_model`, which needs torch."""
        return {
            "path": self.source,
            "device": self.device,
            "precision": self.dtype,
            "seq_len": self.seq_len,
            "say": print_note,
        }


def print_note(text: str) -> None:
    """Notes go beside the output, which may be read by another program."""
    print(text, file=sys.stderr, flush=True)
