"""The folder in which the commands of README.md and docs/ are run: a small file, run or folder of weights under every
name that the pages use and do not make themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path

import pyarrow
import torch

from moefold.cli.main import run_command_line
from moefold.layout.axes import single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run
from moefold.watch.hang_report import RankState, make_report, write_report
from tests.support.doc_commands import ROOT
from tests.support.hf_models import make, save
from tests.support.prepared import varied_texts, write_jsonl
from tests.support.ranks import CONTEXT
from tests.support.runs import corpus
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

SMALL_RUN = [
    *("--model.layers", "2", "--model.hidden", "32", "--model.moe.ffn", "32", "--data.seq_len", "64"),
    *("--train.global_batch", "4", "--train.micro_batch", "4", "--train.steps", "6", "--checkpoint.every", "6"),
    *("--train.validate_sequences", "2", "--train.sample_tokens", "0", "--observe.tensorboard", "false"),
]
SIZES = {"num_hidden_layers": 2, "vocab_size": ENTRIES, "max_position_embeddings": 512}
EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WEIGHTS = ("Qwen3-30B-A3B", "DIR")
DENSE_WEIGHTS = ("Llama-3.1-8B", "DENSE")
RUN_COPIES = ("RUN", "OTHER", "A", "B", "runs/bias-on", "runs/bias-off", "runs/tiny-20260101-120000")
SWAPPED_EXPERTS = (2, 5)
QUESTION = {"role": "user", "content": "red"}
ANSWERS = [{"role": "assistant", "content": word} for word in ("stop", "go")]


def document_folder_at(folder: Path) -> Path:
    """Write the folder, in a process that has torch loaded."""
    folder.mkdir()
    process = CONTEXT.Process(target=write_document_folder, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0, "the folder of the documents' commands could not be written"
    return folder


def write_document_folder(folder: Path) -> None:
    torch.set_num_threads(1)
    with chdir(folder):
        write_texts(Path())
        write_samples(Path())
        write_weights(Path())
        write_runs(Path())
        write_prepared(Path())
        write_costs(Path())


def write_texts(folder: Path) -> None:
    corpus(folder)
    (folder / "corpus.txt").rename("notes.txt")
    for name in ("more", "corpus", "notes"):
        write_jsonl(folder / f"{name}.jsonl", varied_texts(200, name))
    with pyarrow.output_stream(folder / "notes.jsonl.zst", compression="zstd") as packed:
        packed.write((folder / "notes.jsonl").read_bytes())
    for name in ("books/one.txt", "src/one.py"):
        path = folder / name
        path.parent.mkdir()
        path.write_text("def one():\n    return 1\n" * 20)


def write_samples(folder: Path) -> None:
    chat = {"messages": [QUESTION, ANSWERS[0]]}
    pair = {"prompt": "two and two: ", "response": "four"}
    preference = {"prompt": "red", "chosen": "stop", "rejected": "go"}
    for name, sample in {"chats": chat, "pairs": pair, "preferences": preference}.items():
        write_lines(folder / f"{name}.jsonl", [sample] * 200)


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_weights(folder: Path) -> None:
    """Published weights, in the sizes of tests, with a tokenizer that has a chat template."""
    write_tokenizer(folder)
    models = {"Qwen3Moe": (WEIGHTS, EXPERTS), "Llama": (DENSE_WEIGHTS, {"intermediate_size": 32})}
    for kind, (names, options) in models.items():
        for name in names:
            save(make(kind, **SIZES, **options), folder / name)
            write_tokenizer(folder / name)


def write_runs(folder: Path) -> None:
    """Real runs, but for those whose report alone is looked at."""
    train("tiny", "runs/tiny")
    write_edited(folder / "runs/edited")
    for name in RUN_COPIES:
        shutil.copytree(folder / "runs/tiny", folder / name)
    train("qwen3-30b-a3b-tiny", "runs/Qwen3-30B-A3B-20260101-120000")
    shutil.rmtree(folder / "RUN")
    shutil.copytree(folder / "runs/Qwen3-30B-A3B-20260101-120000", folder / "RUN")
    stopped = RankState(2, stacks="  File step.py, line 1", pid=1, host="node0")
    write_report(make_report("step 4 did not end within 60 s", [stopped]), folder / "RUN")


def train(preset: str, out: str) -> None:
    words = ["train", preset, *SMALL_RUN, "--data.source", "files", "--data.files", "notes.txt", "--out", out]
    assert run_command_line(words) == 0


def write_edited(folder: Path) -> None:
    """`runs/tiny`, two experts of which are swapped."""
    shutil.copytree(folder.with_name("tiny"), folder)
    config = resolve_recipe(str(folder / "config.yaml"), [], 1)
    run = assemble_run(config, single_rank_world("cpu"), folder)
    assert resume_run(run, "auto", print)
    weights = dict(run.model.named_parameters())["blocks.1.moe.experts.down"]
    one, other = SWAPPED_EXPERTS
    with torch.no_grad():
        weights[[one, other]] = weights[[other, one]]
    shutil.rmtree(folder / "checkpoints")
    with make_background_saver(run, print) as saver:
        begin_checkpoint(run, saver)


def write_prepared(folder: Path) -> None:
    for name in ("web", "code"):
        words = ["data", "prepare", "more.jsonl", "--out", f"prepared/{name}"]
        assert run_command_line(words) == 0


def write_costs(folder: Path) -> None:
    """Costs of a pipeline's ops, and of this machine as `moefold bench calibrate` writes them."""
    (folder / "costs.yaml").write_text("W: {E: 0, d: 0.7, t: 1, m: 1.6, L: 0.5}\n")
    shutil.copy(ROOT / "moefold/plan/gpus/h100.yaml", folder / "my.yaml")
    drawings = folder / "docs/schedules"
    drawings.mkdir(parents=True)
    shutil.copy(ROOT / "docs/schedules/comm.yaml", drawings)
