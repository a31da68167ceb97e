"""Turn a dense model into a Mixture-of-Experts model that computes the same, and train that on.

    python examples/upcycle.py DENSE_FOLDER      # Llama, Mistral, Qwen2 or Qwen3; without one: a small random Llama

The same by commands:

    moefold convert DENSE_FOLDER sparse --upcycle E4T2
    moefold train --from-hf sparse --data.source files --data.files notes.txt
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import moefold
from moefold.cli.main import run_command_line

PLAN = "E4T2"  # every MLP is copied four times; a token is routed to two copies


def write_dense_model(folder: Path) -> None:
    """A random Llama over bytes, so that no tokenizer is needed."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def largest_difference(dense: Path, sparse: Path) -> float:
    """Between the logits of both models, by transformers."""
    ids = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (dense, sparse)]
    with torch.no_grad():
        expected, found = (model(ids).logits for model in models)
    return (expected - found).abs().max().item()


def upcycle(dense: Path, sparse: Path) -> float:
    code = run_command_line(["convert", str(dense), str(sparse), "--upcycle", PLAN])
    assert code == 0
    return largest_difference(dense, sparse)


def train_on(sparse: Path, out: Path, steps: int) -> None:
    """By the command line; the run's folder has metrics, checkpoints and the load of every expert."""
    sizes = ["--data.seq_len", "64", "--train.micro_batch", "8", "--train.validate_sequences", "16"]
    argv = ["train", "--from-hf", str(sparse), "--out", str(out), "--train.steps", str(steps), *sizes]
    code = run_command_line([*argv, "--data.source", "files", "--data.files", moefold.__path__[0]])
    assert code == 0


def main(folder: str = "", steps: int = 100) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        dense = Path(folder) if folder else place / "dense"
        if not folder:
            write_dense_model(dense)
        difference = upcycle(dense, place / "sparse")
        print(f"largest difference of logits: {difference:.1e}")
        train_on(place / "sparse", place / "run", steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
