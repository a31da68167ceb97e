"""`--init-from`: the weights of a checkpoint, and nothing else of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.format.boxes import whole_box
from moefold.checkpoint.format.verify import open_checkpoint
from moefold.checkpoint.live.saved_model import SavedModel, read_tensor_box
from tests.support.runs import SMALL, command, corpus, metrics


def small_run(tmp_path: Path, name: str, *more: str) -> list[str]:
    return ["train", "tiny", *SMALL, *corpus(tmp_path), "--out", str(tmp_path / name), *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps on a pipeline of two ranks: another layout than that of the runs that start from it."""
    folder = tmp_path_factory.mktemp("trained")
    argv = small_run(folder, "run", "--train.steps", "8", "--optim.warmup", "0", "--nproc", "2", "--parallel.pp", "2")
    code, output = command(argv, folder / "log")
    assert code == 0, output
    return folder / "run"


def init_run(tmp_path: Path, trained: Path, *more: str) -> tuple[int | None, str]:
    argv = small_run(tmp_path, "new", "--train.steps", "2", "--init-from", str(trained), *more)
    return command(argv, tmp_path / "log")


def test_a_run_starts_at_step_0_with_the_weights_of_a_checkpoint_and_nothing_else_of_it(tmp_path: Path, trained: Path):
    code, output = init_run(tmp_path, trained, "--checkpoint.every", "1", "--checkpoint.keep", "9")
    assert code == 0, output
    assert "step-00000008, trained for 8 steps; optimizer and data start anew" in output
    before, after = metrics(trained), metrics(tmp_path / "new")
    assert [line["step"] for line in after] == [0, 1, 2]
    assert after[0]["val_loss"] == pytest.approx(before[-1]["val_loss"], abs=1e-5)
    state = json.loads((tmp_path / "new" / "checkpoints" / "step-00000001" / "state.json").read_text())
    assert state["step"] == 1
    assert state["consumed"] == 8, "the first batch of the text"


def test_a_run_that_was_interrupted_goes_on_from_its_own_checkpoint(tmp_path: Path, trained: Path):
    assert init_run(tmp_path, trained)[0] == 0
    code, output = init_run(tmp_path, trained, "--resume", "auto", "--train.steps", "3")
    assert code == 0, output
    assert "at step 2" in output
    assert "starting from the weights" not in output
    assert metrics(tmp_path / "new")[-1]["step"] == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model.moe.ffn", "48"], "model.moe.ffn = 48, but the checkpoint has 32"),
        (["--model.layers", "3"], "model.layers = 3, but the checkpoint has 2"),
        (["--resume", "elsewhere"], "--init-from and --resume elsewhere both name a checkpoint"),
        (["--from-hf", "elsewhere"], "--init-from and --from-hf both name weights"),
        (["--init-from", "nowhere"], "--init-from nowhere: no such folder"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(words: list[str], reason: str, tmp_path: Path, trained: Path):
    code, output = init_run(tmp_path, trained, *words)
    assert code == 2, output
    assert reason in output
    assert not (tmp_path / "new" / "metrics.jsonl").exists()


def test_a_hugging_face_folder_is_pointed_to_its_own_option(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    code, output = init_run(tmp_path, tmp_path)
    assert code == 2
    assert "use --from-hf" in output


def test_settings_that_shape_nothing_may_differ_and_are_recorded(tmp_path: Path, trained: Path):
    code, output = init_run(tmp_path, trained, "--model.moe.balance.z_loss", "0.001", "--optim.lr", "1e-4")
    assert code == 0, output
    (line,) = [json.loads(line) for line in (tmp_path / "new" / "changes.jsonl").read_text().splitlines()]
    assert line["step"] == 0
    assert line["changed"] == {"model.moe.balance.z_loss": {"from": 0.0, "to": 0.001}}


def test_weights_in_fp32_start_from_the_main_weights_of_a_bf16_run(tmp_path: Path):
    bf16 = small_run(tmp_path, "bf16", "--train.steps", "2", "--train.precision", "bf16")
    code, output = command(bf16, tmp_path / "log")
    assert code == 0, output
    # A learning rate too small to change a weight shows the weights that the run starts with.
    still = ["--train.steps", "1", "--optim.lr", "1e-30", "--optim.weight_decay", "0"]
    argv = small_run(tmp_path, "fp32", *still, "--init-from", str(tmp_path / "bf16"))
    code, output = command(argv, tmp_path / "log")
    assert code == 0, output
    saved = SavedModel(open_checkpoint(tmp_path / "bf16" / "checkpoints" / "latest"))
    started = SavedModel(open_checkpoint(tmp_path / "fp32" / "checkpoints" / "latest"))
    name = "embedding.weight"
    box = whole_box(saved.ledger_entry(name).shape)
    main = read_tensor_box(saved.box_reader, f"optimizer.{name}.main", box)
    assert torch.equal(started.fetch_box(name, box), main)
    assert not torch.equal(main, saved.fetch_box(name, box).float())
