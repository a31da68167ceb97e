"""`moefold generate` as a person meets it: text of a run and of a published model, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

import moefold
from moefold.cli.main import run_command_line
from tests.support.hf_models import CASES, make, save
from tests.support.runs import SMALL, corpus
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, whose experts have a capacity in training."""
    folder = tmp_path_factory.mktemp("run")
    argv = ["train", "tiny", *SMALL, *corpus(folder), "--train.device", "cpu", "--out", str(folder / "out")]
    argv += ["--train.steps", "2", "--checkpoint.every", "2", "--model.moe.capacity.factor", "1.5"]
    assert run_command_line(argv) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published")
    kind, options = CASES["mixtral"]
    save(make(kind, **{**options, "vocab_size": ENTRIES, "num_hidden_layers": 1}), path)
    write_tokenizer(path)
    return path


def generate(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert run_command_line(["generate", *map(str, words), "--device", "cpu"]) == 0
    return capsys.readouterr().out


def test_a_run_continues_a_prompt_and_seeds_repeat(run: Path, capsys: pytest.CaptureFixture[str]):
    words = [run, "--prompt", "def ", "--tokens", 12, "--temperature", 2]
    text = generate(capsys, *words)
    assert text.startswith("def ")
    assert generate(capsys, *words) == text
    assert generate(capsys, *words, "--seed", 2) != text
    found = moefold.TextGenerator(run, device="cpu").generate("def ", tokens=12, temperature=2)
    assert text == "def " + "".join(map(shown, found[0])) + "\n"


def shown(character: str) -> str:
    """As a terminal gets it."""
    if character in "\n\t" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def test_several_prompts_are_answered_in_one_batch(run: Path, capsys: pytest.CaptureFixture[str]):
    words = [run, "--tokens", 6, "--temperature", 0, "--prompt"]
    together = generate(capsys, *words, "def f(", "x")
    first, second = generate(capsys, *words, "def f("), generate(capsys, *words, "x")
    assert together == f"--- prompt 1 of 2\n{first}--- prompt 2 of 2\n{second}"


def test_a_chat_prints_the_answer_alone(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = [folder, "--prompt", "what is", "--tokens", 5, "--temperature", 0]
    plain, answer = generate(capsys, *words), generate(capsys, *words, "--chat")
    assert plain.startswith("what is")
    assert answer != plain
    found = moefold.TextGenerator(folder, device="cpu").generate("what is", tokens=5, temperature=0, chat=True)
    assert answer == "".join(map(shown, found[0])) + "\n"


REFUSED = {
    "no prompt": ([], "no prompt is given"),
    "a temperature below 0": (["--prompt", "a", "--temperature", "-1"], "temperature = -1.0 is not legal"),
    "a top-p above 1": (["--prompt", "a", "--top-p", "2"], "top_p = 2.0 is not legal"),
    "no tokens": (["--prompt", "a", "--tokens", "0"], "tokens = 0 is not legal"),
    "an empty prompt": (["--prompt", ""], "the prompt has no tokens"),
    "a prompt longer than the model": (["--prompt", "a" * 40], "has 40 tokens; expected fewer than 32"),
    "an empty stop string": (["--prompt", "a", "--stop", ""], "a stop string is empty"),
    "a chat without a template": (["--prompt", "a", "--chat"], "a chat needs the chat template"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_generated_is_refused(what: str, run: Path, capsys: pytest.CaptureFixture[str]):
    words, message = REFUSED[what]
    assert run_command_line(["generate", str(run), *words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model_or_a_tokenizer_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--prompt", "a", "--device", "cpu"]
    assert run_command_line(["generate", str(tmp_path / "none"), *words]) == 2
    assert "does not exist; expected a run" in capsys.readouterr().err
    assert run_command_line(["generate", str(tmp_path), *words]) == 2
    assert "neither a run, nor a checkpoint, nor a folder" in capsys.readouterr().err
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert run_command_line(["generate", str(tmp_path), *words]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
