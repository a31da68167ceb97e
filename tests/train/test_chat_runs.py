"""Runs on chats: a model answers as it was taught, with all weights and then with adapters beside them, and so does
transformers with the merged weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from tests.support.hf_models import hf
from tests.support.runs import SMALL
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

ANSWERS = {"red": "stop", "green": "go", "blue": "wait", "white": "turn"}
OTHERS = {"red": "turn", "green": "wait", "blue": "go", "white": "stop"}
TRAIN = [
    *("--data.source", "files", "--data.format", "chat", "--data.attend", "document", "--data.packing", "best_fit"),
    *("--data.held_out", "0.2", "--model.vocab", str(ENTRIES), "--model.moe.balance.bias_rate", "0"),
    *("--model.layers", "1", "--train.micro_batch", "8", "--train.steps", "40", "--train.validate_every", "40"),
    *("--checkpoint.every", "40", "--optim.lr", "0.015", "--optim.warmup", "5", "--train.sample_tokens", "0"),
    *("--train.device", "cpu"),
]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def teach(folder: Path, name: str, answers: dict[str, str], *more: str) -> Path:
    """A run on some dozens of chats."""
    chats = [[message("user", asked), message("assistant", answer)] for asked, answer in answers.items()]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(lines * 12))
    data = ["--data.files", str(file), "--data.tokenizer", str(folder / "tokenizer.json")]
    out = folder / name
    assert run_command_line(["train", "tiny", *SMALL, *TRAIN, *data, *more, "--out", str(out)]) == 0
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


@pytest.mark.extended
def test_a_model_answers_as_it_was_taught_and_adapters_teach_it_other_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_tokenizer(tmp_path)
    base = teach(tmp_path, "base", ANSWERS)
    assert answers_of(base, capsys) == ANSWERS
    tuned = teach(tmp_path, "tuned", OTHERS, "--init-from", str(base), "--lora.rank", "8")
    assert answers_of(tuned, capsys) == OTHERS
    assert run_command_line(["convert", str(tuned), str(tmp_path / "merged")]) == 0
    assert answers_of_transformers(tmp_path / "merged", tmp_path) == OTHERS
    # The adapters alone, by expert, are the start of a run that hardly moves them.
    adapter = tmp_path / "adapter"
    assert run_command_line(["convert", str(tuned), str(adapter), "--to", "peft_by_expert"]) == 0
    assert "as vLLM and SGLang load them" in capsys.readouterr().out
    start = ["--init-from", str(base), "--lora-from", str(adapter), "--checkpoint.every", "1", "--train.steps", "1"]
    again = teach(tmp_path, "again", ANSWERS, *start, "--optim.lr", "1e-6", "--optim.warmup", "0")
    assert answers_of(again, capsys, ["red"]) == {"red": OTHERS["red"]}
    assert run_command_line(["train", "tiny", "--lora-from", str(adapter), *TRAIN]) == 2
    assert "lora_A [8, 32] and lora_B [32, 8]; expected [8, 128] and [128, 8]" in capsys.readouterr().err
