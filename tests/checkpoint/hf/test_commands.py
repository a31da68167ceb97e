"""Train from a folder, write one, and make a dense model sparse: through the command line's own entry."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import moefold
from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.export import export_hf_weights
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.cli.main import run_command_line
from moefold.cli.train import TrainOptions, rank_arguments
from moefold.config.run import Config, DataConfig, ParallelConfig, TrainConfig
from moefold.data.corpus import Corpus
from moefold.layout.axes import World
from moefold.train.assemble import assemble_run
from moefold.train.from_hf import starting_weights
from moefold.train.resume import begin_checkpoint, make_background_saver
from moefold.train.step import train_step
from tests.support.hf_models import CASES, DENSE, SIZES, hf, make, save, tokens
from tests.support.ranks import run_ranks
from tests.support.runs import command, corpus, metrics
from tests.support.tiny_tokenizer import write_words

TRAIN = [
    *("--data.seq_len", "32", "--train.global_batch", "8", "--train.micro_batch", "2", "--train.steps", "6"),
    *("--train.validate_sequences", "8", "--train.sample_tokens", "0", "--observe.tensorboard", "false"),
    *("--optim.lr", "3e-3", "--optim.warmup", "0", "--train.precision", "fp32"),
]


def trained(start: Path, out: Path, tmp_path: Path, *more: str) -> str:
    argv = ["train", "--from-hf", str(start), "--out", str(out), *TRAIN, *corpus(tmp_path), *more]
    code, said = command(argv, tmp_path / "log")
    assert code == 0, said
    return said


def test_a_run_starts_from_a_folder_and_becomes_one_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first validation is that of the folder's weights; what is written is what transformers computes with."""
    kind, options = CASES["qwen3 dense layers, window"]
    start = save(make(kind, **{**options, "vocab_size": 256}), tmp_path / "hf")
    out, said = tmp_path / "run", trained(start, tmp_path / "run", tmp_path)
    assert "starting from" in said
    assert "saved as F32, float32 here" in said
    lines = metrics(out)
    assert lines[-1]["loss"] < lines[1]["loss"]

    assert run_command_line(["convert", str(out), "--to", "hf", str(tmp_path / "back")]) == 0
    assert "qwen3_moe" in capsys.readouterr().out
    theirs = hf().AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    ours = moefold.from_hf(tmp_path / "back", seq_len=32)
    ids = tokens()
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "experts" in name), "it has trained"


def test_every_rank_is_told_where_to_start_from():
    options = TrainOptions(from_hf=Path("weights"), nproc=2)
    words = rank_arguments(options, ["--parallel.tp", "2"], Path("out"))
    assert words[words.index("--from-hf") + 1] == "weights"


def save_on(world: World, start: str, out: str, steps: int) -> dict[str, torch.Tensor]:
    """A run of this layout that starts from a folder, takes some steps, hands its weights on, and is saved."""
    folder = Path(start)
    degrees = {name: world.axis(name).size for name in ("tp", "ep", "etp", "pp")}
    config = Config(
        model=describe_model(open_model_folder(folder)).model,
        data=DataConfig(seq_len=16, tokenizer=str(folder / "tokenizer.json")),
        train=TrainConfig(global_batch=4, micro_batch=1, validate_sequences=4, precision="bf16"),
        parallel=ParallelConfig(**degrees),
    )
    corpus = Corpus(np.arange(400) % 48, np.arange(400) % 48)
    weights = starting_weights(folder, config, world, lambda text: None)
    made = assemble_run(config, world, Path(out), corpus, weights)
    for _ in range(steps):
        train_step(made, made.loader.next_batch())
    assert bool(made.parameters.under_way) == (steps > 0)
    exported = {name: tensor.clone() for name, tensor in export_hf_weights(made.model, config.model, world)}
    assert not made.parameters.under_way, "weights were read before they had arrived"
    with make_background_saver(made, str) as saver:
        begin_checkpoint(made, saver)
    return exported


@pytest.mark.parametrize("parallel", [{"tp": 2, "ep": 4}, {"pp": 2, "etp": 2}])
def test_a_checkpoint_of_any_layout_is_written_as_it_came(parallel: dict[str, int], tmp_path: Path):
    """From a folder into parts on four ranks, from there into a checkpoint, and back to the byte."""
    kind, options = CASES["deepseek v3"]
    start = save(make(kind, **options).to(torch.bfloat16), tmp_path / "hf")
    write_words(start, SIZES["vocab_size"])
    run_ranks(save_on, 4, str(start), str(tmp_path / "run"), 0, **parallel)
    assert run_command_line(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].to(tensor.dtype), tensor), name


def test_weights_handed_on_right_behind_a_step_are_those_of_the_next_checkpoint(tmp_path: Path):
    """Replicas still hand each other their shares when the export begins; every rank gets the new weights."""
    kind, options = CASES["mixtral"]
    start = save(make(kind, **options), tmp_path / "hf")
    write_words(start, SIZES["vocab_size"])
    exported = run_ranks(save_on, 4, str(start), str(tmp_path / "run"), 1, tp=2, ep=2)
    assert run_command_line(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert not torch.equal(before["lm_head.weight"].bfloat16(), after["lm_head.weight"])
    for of_rank in exported:
        assert of_rank.keys() == after.keys()
        assert all(torch.equal(of_rank[name], after[name]) for name in after)


def test_shards_and_their_index_hold_what_one_file_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moefold.checkpoint.hf.write_weights.SHARD_BYTES", 20_000)
    kind, options = CASES["deepseek v3"]
    start = save(make(kind, **options), tmp_path / "hf")
    assert run_command_line(["convert", str(start), str(tmp_path / "out"), "--to", "hf"]) == 0
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    before = load_file(start / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    loaded = hf().AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, make(kind, **options)(tokens()).logits)


def test_a_folder_that_is_not_empty_is_left_alone_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kind, options = CASES["mixtral"]
    start, out = save(make(kind, **options), tmp_path / "hf"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert run_command_line(["convert", str(start), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    assert run_command_line(["convert", str(start), str(out), "--overwrite"]) == 0
    assert (out / "mine.txt").read_text() == "mine"
    assert (out / "model.safetensors").exists()


def test_tokenizer_files_go_along(tmp_path: Path):
    kind, options = CASES["mixtral"]
    start = save(make(kind, **options), tmp_path / "hf")
    (start / "tokenizer.json").write_text("{}")
    (start / "tokenizer_config.json").write_text('{"a": 1}')
    assert run_command_line(["convert", str(start), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


PLANS = [*((which, plan) for which in DENSE for plan in ("E8T2", "E8G2T2")), ("llama", "E4G4T8"), ("llama", "E3T3")]


@pytest.mark.parametrize(("which", "plan"), PLANS)
def test_an_upcycled_model_computes_what_the_dense_one_does(which: str, plan: str, tmp_path: Path):
    """By transformers' own reckoning, of both. The routers choose: copies differ in nothing but their rows."""
    kind, options = DENSE[which]
    dense = make(kind, **options)
    start, out = save(dense, tmp_path / "dense"), tmp_path / "sparse"
    assert run_command_line(["convert", str(start), str(out), "--upcycle", plan]) == 0
    sparse = hf().AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(sparse(tokens()).logits, dense(tokens()).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            moefold.from_hf(out, seq_len=32).logits(tokens()), dense(tokens()).logits, rtol=0, atol=1e-5
        )


def test_an_upcycled_model_keeps_the_activation_of_the_dense_one(tmp_path: Path):
    dense = make("Llama", intermediate_size=32, hidden_act="gelu")
    start, out = save(dense, tmp_path / "dense"), tmp_path / "sparse"
    assert run_command_line(["convert", str(start), str(out), "--upcycle", "E4T2"]) == 0
    assert json.loads((out / "config.json").read_text())["hidden_act"] == "gelu"
    sparse = hf().AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(sparse(tokens()).logits, dense(tokens()).logits, rtol=0, atol=1e-5)


def test_an_upcycled_model_in_bf16_computes_the_same_if_scaling_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """down x 2 is exact in bf16 and down x 3 is not: the check at the end of the command tells."""
    start = save(make("Llama", intermediate_size=48).to(torch.bfloat16), tmp_path / "dense")
    assert run_command_line(["convert", str(start), str(tmp_path / "two"), "--upcycle", "E4G2T2"]) == 0
    assert run_command_line(["convert", str(start), str(tmp_path / "three"), "--upcycle", "E4G3T3"]) == 1
    assert "does not compute what" in capsys.readouterr().err
    assert (
        run_command_line(["convert", str(start), str(tmp_path / "wide"), "--upcycle", "E4G3T3", "--dtype", "fp32"]) == 0
    )


def test_training_goes_on_from_an_upcycled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kind, options = DENSE["llama"]
    start = save(make(kind, **{**options, "vocab_size": 256}), tmp_path / "dense")
    assert run_command_line(["convert", str(start), str(tmp_path / "sparse"), "--upcycle", "E4G2T4"]) == 0
    assert "the same as the dense model" in capsys.readouterr().out
    trained(tmp_path / "sparse", tmp_path / "run", tmp_path)
    losses = [line["loss"] for line in metrics(tmp_path / "run")[1:]]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("8x2", "is not legal; expected copies"),
        ("E8G2T3", "is no multiple of G = 2"),
        ("E2T3", "more than the 2 experts"),
        ("E2G5T5", "does not divide the MLP's width, 24"),
        ("E0T0", "at least 1"),
    ],
)
def test_a_plan_that_cannot_compute_the_same_is_refused(
    plan: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    start = save(make("Llama"), tmp_path / "dense")
    assert run_command_line(["convert", str(start), str(tmp_path / "out"), "--upcycle", plan]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_selection_biases_that_a_family_has_no_place_for_are_not_lost(tmp_path: Path):
    kind, options = CASES["qwen3"]
    start = save(make(kind, **{**options, "vocab_size": 256}), tmp_path / "hf")
    trained(start, tmp_path / "run", tmp_path, "--model.moe.balance.bias_rate", "0.01", "--train.steps", "2")
    code, said = command(["convert", str(tmp_path / "run"), str(tmp_path / "out")], tmp_path / "log")
    assert code == 2
    assert "no place for selection biases" in said
    assert not (tmp_path / "out").exists()
