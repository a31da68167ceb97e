"""`data.tokenizer trained`: the vocabulary of a run is in its folder, and goes where its weights go."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moefold
from moefold.config.errors import UserError
from moefold.config.run import Config, DataConfig, ModelConfig
from moefold.layout.axes import single_rank_world
from moefold.observe.printer import print_nothing
from moefold.train.run_vocabulary import VOCABULARY_FILE, open_run_tokenizer, place_vocabulary, train_aloud
from moefold.train.text_model import load_text_model
from tests.support.runs import SMALL, command, corpus, numbers

TRAINED = ["--data.tokenizer", "trained", "--model.vocab", "400", "--model.moe.balance.bias_rate", "0"]


def arguments(folder: Path, name: str, steps: int, *more: str) -> list[str]:
    own_text = corpus(folder)
    out = str(folder / name)
    settings = [*SMALL, *own_text, *TRAINED, "--train.steps", str(steps), "--nproc", "2"]
    return ["train", "tiny", *settings, "--out", out, *more]


def trained_run(folder: Path, name: str, steps: int, *more: str) -> Path:
    code, output = command(arguments(folder, name, steps, *more), folder / "log")
    assert code == 0, output
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    return trained_run(folder, "run", 2)


def test_a_run_is_found_with_its_vocabulary_wherever_its_folder_is_moved(run: Path, tmp_path: Path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved)
    text = "def f1(x):\n    return x * 1\n"
    for place in (moved, moved / "checkpoints", next((moved / "checkpoints").glob("step-*"))):
        tokenizer = load_text_model(place, device="cpu").tokenizer
        assert tokenizer.size == 400
        tokens = tokenizer.encode(text).tolist()
        assert tokenizer.decode(tokens) == text
        assert len(tokens) < len(text) / 2
    (moved / VOCABULARY_FILE).unlink()
    with pytest.raises(UserError, match=r"data\.tokenizer = trained, and there is no tokenizer\.json"):
        load_text_model(moved, device="cpu")


@pytest.mark.extended
def test_a_resumed_run_has_the_bits_of_one_that_went_on_and_a_converted_one_its_tokens(run: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    whole = trained_run(tmp_path, "whole", 3)
    parted = tmp_path / "parted"
    shutil.copytree(run, parted)
    before = (parted / VOCABULARY_FILE).stat().st_mtime_ns
    trained_run(tmp_path, "parted", 3, "--resume", "auto")
    assert (parted / VOCABULARY_FILE).stat().st_mtime_ns == before, "trained once"
    assert numbers(parted)[-1] == numbers(whole)[-1]
    assert (parted / VOCABULARY_FILE).read_bytes() == (whole / VOCABULARY_FILE).read_bytes()
    code, output = command(["convert", str(parted), str(tmp_path / "hf"), "--to", "hf"], tmp_path / "log")
    assert code == 0, output
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def f1(x):\n    return x * 1\n"
    ours = moefold.TextGenerator(parted, device="cpu").tokenizer
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.eos_token_id == ours.end.id


def tiny_config(folder: Path, text: str) -> Config:
    (folder / "text.txt").write_text(text)
    data = DataConfig(source="files", files=(str(folder / "text.txt"),), tokenizer="trained")
    return Config(data=data, model=ModelConfig(vocab=300))


def test_weights_of_another_run_bring_their_vocabulary_and_a_new_run_trains_its_own(run: Path, tmp_path: Path):
    config = tiny_config(tmp_path, "one two three " * 300)
    own = train_aloud(config, print_nothing)
    theirs = (run / VOCABULARY_FILE).read_text()
    out = tmp_path / "out"
    out.mkdir()
    for earlier in (run, run / "checkpoints", out):
        assert place_vocabulary(config, out, str(earlier), print_nothing) == theirs
        assert (out / VOCABULARY_FILE).read_text() == theirs
    assert place_vocabulary(config, out, None, print_nothing) == own
    assert (out / VOCABULARY_FILE).read_text() == own
    assert own != theirs


def test_weights_without_a_vocabulary_are_refused(run: Path, tmp_path: Path):
    config = tiny_config(tmp_path, "one two three " * 300)
    bare = tmp_path / "bare"
    shutil.copytree(run / "checkpoints", bare / "checkpoints")
    with pytest.raises(UserError, match=r"bare has no tokenizer\.json: its weights belong to another vocabulary"):
        place_vocabulary(config, tmp_path, str(bare), print_nothing)


def test_a_damaged_vocabulary_is_refused_by_the_name_of_its_file(tmp_path: Path):
    config = tiny_config(tmp_path, "one two three " * 300)
    with pytest.raises(UserError, match=r"run/tokenizer\.json is not a tokenizer\.json: expected"):
        open_run_tokenizer(config, single_rank_world(), tmp_path / "run", '{"a":')


def test_weights_on_remote_storage_bring_their_vocabulary(run: Path, tmp_path: Path):
    pytest.importorskip("fsspec")
    config = tiny_config(tmp_path, "one two three " * 300)
    theirs = (run / VOCABULARY_FILE).read_text()
    for place in ("", "/checkpoints"):
        assert place_vocabulary(config, tmp_path, f"file://{run}{place}", print_nothing) == theirs


def test_a_run_that_has_no_checkpoint_yet_trains_its_vocabulary_anew(run: Path, tmp_path: Path):
    """What an earlier start has left there may be of another text."""
    out = tmp_path / "again"
    out.mkdir()
    (out / VOCABULARY_FILE).write_text(train_aloud(tiny_config(tmp_path, "one two three " * 300), print_nothing))
    trained_run(tmp_path, "again", 1, "--resume", "auto")
    assert (out / VOCABULARY_FILE).read_bytes() == (run / VOCABULARY_FILE).read_bytes()


def test_without_the_library_a_run_ends_with_what_to_install(tmp_path: Path):
    """A module of None cannot be imported: Python's own mark of one that is absent."""
    program = "import sys; sys.modules['tokenizers'] = None; from moefold.__main__ import main; sys.exit(main())"

    argv = [sys.executable, "-c", program, *arguments(tmp_path, "run", 1, "--nproc", "1")]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "pip install 'moefold[hf]', or set data.tokenizer to byte" in ended.stderr
