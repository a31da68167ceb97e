"""Runs on chats: a model answers as it was taught, with all weights, with adapters beside them, and from a folder of
Hugging Face's form with some weights frozen; and so does transformers with what is exported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from moefold.cli.main import run_command_line
from tests.support.hf_models import hf
from tests.support.runs import SMALL
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

ANSWERS = {"red": "stop", "green": "go", "blue": "wait", "white": "turn"}
OTHERS = {"red": "turn", "green": "wait", "blue": "go", "white": "stop"}
TRAIN = [
    *("--data.source", "files", "--data.format", "chat", "--data.attend", "document", "--data.packing", "best_fit"),
    *("--data.held_out", "0.2", "--train.micro_batch", "8", "--train.steps", "40", "--train.validate_every", "40"),
    *("--checkpoint.every", "40", "--optim.lr", "0.015", "--optim.warmup", "5", "--train.sample_tokens", "0"),
    *("--train.device", "cpu"),
]

MODEL = ["--model.vocab", str(ENTRIES), "--model.moe.balance.bias_rate", "0", "--model.layers", "1"]
TINY = ["tiny", *SMALL, *MODEL]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def teach(folder: Path, name: str, answers: dict[str, str], *more: str, start: Sequence[str] = TINY) -> Path:
    """A run on some dozens of chats."""
    chats = [[message("user", asked), message("assistant", answer)] for asked, answer in answers.items()]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(lines * 12))
    data = ["--data.files", str(file), "--data.tokenizer", str(folder / "tokenizer.json")]
    out = folder / name
    assert run_command_line(["train", *start, *TRAIN, *data, *more, "--out", str(out)]) == 0
    return out


def answers_of(path: Path, capsys: pytest.CaptureFixture[str], questions: Iterable[str] = ANSWERS) -> dict[str, str]:
    """What `moefold generate` prints for each question, the likeliest token at a time."""
    found: dict[str, str] = {}
    for asked in questions:
        capsys.readouterr()
        words = ["generate", str(path), "--chat", "--prompt", asked, "--temperature", "0", "--tokens", "8"]
        assert run_command_line([*words, "--device", "cpu"]) == 0
        found[asked] = capsys.readouterr().out.strip()
    return found


def answers_of_transformers(weights: Path, tokenizer: Path) -> dict[str, str]:
    library = hf()
    model = library.AutoModelForCausalLM.from_pretrained(weights)
    words = library.AutoTokenizer.from_pretrained(tokenizer)
    found: dict[str, str] = {}
    for asked in ANSWERS:
        chat = [message("user", asked)]
        prompt = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        (ids,) = model.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=words.eos_token_id)
        answer = ids[prompt["input_ids"].shape[1] :]
        found[asked] = words.decode(answer, skip_special_tokens=True)
    return found


class Taught(NamedTuple):
    """A folder with a tokenizer and two runs: of all weights, and of adapters beside these."""

    folder: Path
    base: Path
    tuned: Path


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("taught")
    write_tokenizer(folder)
    base = teach(folder, "base", ANSWERS)
    tuned = teach(folder, "tuned", OTHERS, "--init-from", str(base), "--lora.rank", "8")
    return Taught(folder, base, tuned)


@pytest.mark.extended
def test_a_model_answers_as_it_was_taught_and_adapters_teach_it_other_answers(
    taught: Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert answers_of(taught.base, capsys) == ANSWERS
    assert answers_of(taught.tuned, capsys) == OTHERS
    assert run_command_line(["convert", str(taught.tuned), str(tmp_path / "merged")]) == 0
    assert answers_of_transformers(tmp_path / "merged", taught.folder) == OTHERS


@pytest.mark.extended
def test_adapters_alone_are_the_start_of_a_run(taught: Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By expert; the run hardly moves them."""
    folder, base, tuned = taught
    adapter = tmp_path / "adapter"
    assert run_command_line(["convert", str(tuned), str(adapter), "--to", "peft_by_expert"]) == 0
    assert "as vLLM and SGLang load them" in capsys.readouterr().out
    start = ["--init-from", str(base), "--lora-from", str(adapter), "--checkpoint.every", "1", "--train.steps", "1"]
    again = teach(folder, "again", ANSWERS, *start, "--optim.lr", "1e-6", "--optim.warmup", "0")
    assert answers_of(again, capsys, ["red"]) == {"red": OTHERS["red"]}
    assert run_command_line(["train", "tiny", *MODEL, "--lora-from", str(adapter), *TRAIN]) == 2
    assert "lora_A [8, 32] and lora_B [32, 8]; expected [8, 128] and [128, 8]" in capsys.readouterr().err


@pytest.mark.extended
def test_weights_of_transformers_are_tuned_on_chats_with_frozen_routers_and_rates_by_layer(
    taught: Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = tmp_path / "before"
    assert run_command_line(["convert", str(taught.base), str(before)]) == 0
    groups = ["--optim.groups", "*.router.weight: frozen, embedding.*: frozen, blocks.0.attention.*: lr=0.5"]
    sizes = SMALL[SMALL.index("--data.seq_len") :]  # those of a run; the model's are read from its folder
    tuned = teach(taught.folder, "full", OTHERS, *groups, start=["--from-hf", str(before), *sizes])
    after = tmp_path / "after"
    assert run_command_line(["convert", str(tuned), str(after)]) == 0
    old = load_file(before / "model.safetensors")
    new = load_file(after / "model.safetensors")
    frozen = {name for name in old if name.endswith(("mlp.gate.weight", "embed_tokens.weight"))}
    assert len(frozen) == 2
    assert {name for name in old if torch.equal(old[name], new[name])} == frozen
    assert answers_of_transformers(after, taught.folder) == OTHERS
