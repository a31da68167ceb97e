"""Tasks of lm-evaluation-harness from local files: their figures are those of transformers' logits and of its text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.cli.main import run_command_line
from tests.support.hf_models import CASES, hf, make, save
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'moefold[eval]'")

FP32 = 1e-6  # transformers has rotary tables and router scores in fp32 in any model
QUESTIONS = [
    {"question": f"what is {word}", "choices": [" the name", " here", " one that is"], "answer": i % 3}
    for i, word in enumerate(["the one", "that", "here?", "a name of the one", "it"])
]
TEXTS = ["what is the name of the one that is here? " * 3, "the name", "that is"]
NEW = 6
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": NEW},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    path = tmp_path_factory.mktemp("published")
    kind, options = CASES["mixtral"]
    theirs = make(kind, **{**options, "vocab_size": ENTRIES, "num_hidden_layers": 1}).double().eval()
    save(theirs, path)
    write_tokenizer(path)
    return theirs, hf().PreTrainedTokenizerFast.from_pretrained(path), path


def log_p(theirs: Any, context: list[int], wanted: list[int]) -> float:
    with torch.no_grad():
        log_p = theirs(torch.tensor([[*context, *wanted]])).logits.log_softmax(-1)[0]
    rows = log_p[len(context) - 1 : -1]
    return rows.gather(1, torch.tensor(wanted)[:, None]).sum().item()


def expected_accuracy(theirs: Any, tokenizer: Any) -> float:
    right = 0
    for entry in QUESTIONS:
        context = tokenizer(entry["question"])["input_ids"]
        scores: list[float] = []
        for choice in entry["choices"]:
            whole = tokenizer(entry["question"] + choice)["input_ids"]
            scores.append(log_p(theirs, context, whole[len(context) :]))
        right += scores.index(max(scores)) == entry["answer"]
    return right / len(QUESTIONS)


def expected_bits(theirs: Any, tokenizer: Any, longest: int) -> float:
    """Bits a byte, in windows of the longest sequence; the last window has as much context as fits."""
    nats = 0.0
    for text in TEXTS:
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
        for first in range(0, len(ids) - 1, longest):
            wanted = ids[first + 1 : first + 1 + longest]
            inputs = first + len(wanted)
            nats -= log_p(theirs, ids[max(0, inputs - longest) : first + 1], wanted)
    return nats / math.log(2) / sum(len(text.encode()) for text in TEXTS)


def generated(theirs: Any, tokenizer: Any, text: str, chat: bool = False) -> str:
    if chat:
        text = tokenizer.apply_chat_template(user_says(text), add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
    whole = theirs.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=1, pad_token_id=1)
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).split("\n\n")[0]


def user_says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_tasks(folder: Path, entries: dict[str, list[dict[str, Any]]]) -> None:
    """YAML is a superset of JSON."""
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(entry) + "\n" for entry in entries[name]))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **files, **task}))


def test_tasks_from_local_files_have_the_figures_of_transformers(
    published: tuple[Any, Any, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    theirs, tokenizer, path = published
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    questions = [entry["question"] for entry in QUESTIONS]
    answers = [{"question": text, "answer": generated(theirs, tokenizer, text)} for text in questions]
    answers[0]["answer"] += " and more"
    entries = {"choices": QUESTIONS, "texts": [{"text": text} for text in TEXTS], "answers": answers}
    write_tasks(tmp_path, entries)
    options = ["--json", "--device", "cpu", "--dtype", "fp64", "--seq-len", "32", "--batch", "2"]
    words = ["eval", str(path), "--task-folder", str(tmp_path), *options, "--tasks"]
    capsys.readouterr()
    assert run_command_line([*words, "choices,texts", "answers"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert found["choices"]["acc"] == expected_accuracy(theirs, tokenizer)
    assert found["texts"]["bits_per_byte"] == pytest.approx(expected_bits(theirs, tokenizer, 32), rel=FP32)
    assert found["answers"]["exact_match"] == 0.8
    for entry in answers[1:]:
        entry["answer"] = generated(theirs, tokenizer, entry["question"], chat=True)
    write_tasks(tmp_path, entries)
    assert run_command_line([*words, "answers", "--chat"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert found["answers"]["exact_match"] == 0.8


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["tp", "ep"])
def test_two_ranks_of_a_layout_have_the_figures_of_one(
    layout: str,
    published: tuple[Any, Any, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    theirs, tokenizer, path = published
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    questions = [entry["question"] for entry in QUESTIONS]
    answers = [{"question": text, "answer": generated(theirs, tokenizer, text)} for text in questions]
    write_tasks(tmp_path, {"choices": QUESTIONS, "texts": [{"text": text} for text in TEXTS], "answers": answers})
    options = ["--json", "--device", "cpu", "--dtype", "fp64", "--seq-len", "32", "--batch", "2"]
    words = ["eval", str(path), "--task-folder", str(tmp_path), *options, "--tasks", "choices,texts,answers"]
    capfd.readouterr()
    assert run_command_line([*words, "--nproc", "2", f"--parallel.{layout}", "2"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])["results"]
    assert found["choices"]["acc"] == expected_accuracy(theirs, tokenizer)
    assert found["texts"]["bits_per_byte"] == pytest.approx(expected_bits(theirs, tokenizer, 32), rel=FP32)
    assert found["answers"]["exact_match"] == 1.0


def test_questions_in_a_chat_template_have_the_texts_and_scores_of_the_harness_own_class(
    published: tuple[Any, Any, Path],
):
    """Its class `hf` renders and encodes by transformers."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from moefold.train.harness import HarnessModel

    theirs, tokenizer, path = published
    hosted = HFLM(pretrained=theirs, tokenizer=tokenizer, max_length=64)
    ours = HarnessModel(path, device="cpu", precision="fp64", seq_len=64)
    system = {"role": "system", "content": "name it"}
    asked = [system, *user_says("what is that")]
    begun = [*asked, {"role": "assistant", "content": "the name"}]
    texts = [ours.apply_chat_template(asked), ours.apply_chat_template(begun, add_generation_prompt=False)]
    assert texts == [hosted.apply_chat_template(asked), hosted.apply_chat_template(begun, add_generation_prompt=False)]
    assert ours.chat_template(True) == tokenizer.chat_template
    requests = [Instance("loglikelihood", {}, (text, " of the one"), 0) for text in texts]
    expected = hosted.loglikelihood(requests, disable_tqdm=True)
    for (found, greedy), (log_p, is_greedy) in zip(ours.loglikelihood(requests), expected, strict=True):
        assert (found, greedy) == (pytest.approx(log_p, rel=FP32), is_greedy)


def test_a_task_that_nobody_has_is_refused(
    published: tuple[Any, Any, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    from moefold.train import harness

    write_tasks(tmp_path, {name: [] for name in TASKS})
    manager = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda include_path, **_: manager(None, include_path, False))
    words = ["eval", str(published[2]), "--tasks", "choice", "--task-folder", str(tmp_path), "--device", "cpu"]
    assert run_command_line(words) == 2
    assert 'no task "choice" (did you mean "choices"?)' in capsys.readouterr().err
