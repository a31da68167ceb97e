"""The layout of a text model: that of its run where there are several ranks, changed by keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from moefold.cli.text_model_options import TextModelOptions
from moefold.cli.text_model_ranks import layout_on_ranks, saved_config
from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig
from tests.support.hf_models import CASES, make, save
from tests.support.runs import SMALL, corpus


@pytest.mark.extended
def test_ranks_fold_as_the_run_was_trained_unless_keys_say_otherwise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = str(tmp_path / "out")
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), "--train.device", "cpu", "--out", out, "--train.steps", "1"]
    assert run_command_line([*argv, "--nproc", "2", "--parallel.tp", "2", "--checkpoint.every", "1"]) == 0
    source = TextModelOptions(Path(out))
    assert layout_on_ranks(source, [], 1) == ParallelConfig()
    assert layout_on_ranks(source, [], 2) == ParallelConfig(tp=2)
    assert layout_on_ranks(source, ["--parallel.ep", "4"], 4) == ParallelConfig(tp=2, ep=4)
    with pytest.raises(UserError, match=r"does not divide the number of ranks, 3"):
        layout_on_ranks(source, [], 3)
    words = [out, "--device", "cpu", "--dtype", "fp64"]
    texts: list[str] = []
    for ranks in ("1", "2"):
        capfd.readouterr()
        assert run_command_line(["generate", *words, "--nproc", ranks, "--prompt", "def ", "--tokens", "6"]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1]


def test_a_folder_of_weights_has_the_layout_of_the_keys_alone(tmp_path: Path):
    kind, options = CASES["mixtral"]
    source = TextModelOptions(save(make(kind, **options), tmp_path / "hf"))
    assert layout_on_ranks(source, [], 4) == ParallelConfig()
    assert layout_on_ranks(source, ["--parallel.ep", "2", "--parallel.pp=2"], 4) == ParallelConfig(ep=2, pp=2)
    with pytest.raises(UserError, match=r"parallel.ep = 8 does not divide model.moe.experts = 4"):
        layout_on_ranks(source, ["--parallel.ep", "8"], 8)


def test_the_configuration_is_that_of_the_newest_checkpoint_that_can_be_opened(tmp_path: Path):
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), "--train.device", "cpu", "--out", str(tmp_path / "out")]
    assert run_command_line([*argv, "--train.steps", "2", "--checkpoint.every", "1"]) == 0
    older, newest = sorted((tmp_path / "out" / "checkpoints").glob("step-*"))
    (newest / "state.json").write_text("no state")
    assert saved_config(tmp_path / "out").model.layers == 2
    (older / "state.json").unlink()
    assert saved_config(tmp_path / "out").model.layers == 4, "what is not known is left to who reads the weights"
