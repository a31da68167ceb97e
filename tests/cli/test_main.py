"""The command as a person meets it: quick answers, exit codes, no tracebacks."""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from moefold.cli.command_list import COMMANDS
from moefold.cli.main import run_command_line
from moefold.config.keys import format_value, iterate_keys
from moefold.config.run import Config
from moefold.layout.spawn import find_free_port
from moefold.presets.zoo import PRESETS
from moefold.version import __version__
from tests.support.machine_speed import least_seconds

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Runs a command in a process of its own and says whether torch came along.
RUNNER = """
import sys
from moefold.cli.main import run_command_line
try:
    code = run_command_line(sys.argv[1:])
except SystemExit as leaving:
    code = leaving.code
print("torch" if "torch" in sys.modules else "no torch", file=sys.stderr)
sys.exit(code)
"""


def clean_env(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER and not k.startswith("SLURM_")} | more


def start(*words: str, runner: bool = False, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    head = [sys.executable, "-c", RUNNER] if runner else [sys.executable, "-m", "moefold"]
    return subprocess.run(
        [*head, *words], capture_output=True, text=True, env=clean_env(**env), timeout=60, cwd=cwd, errors="replace"
    )


QUICK = {
    "help": (["--help"], 0),
    "help of train": (["train", "--help"], 0),
    "help of all keys": (["train", "--help", "all"], 0),
    "completion": (["--print-completion", "bash"], 0),
    "explain": (["explain", "qwen3-30b-a3b"], 0),
    "simulate": (["simulate", "--schedule", "zb_v", "--microbatches", "16"], 0),
    "plan": (["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h100", "--parallel.ep", "8"], 0),
    "a wrong value": (["train", "tiny", "--optim.lr", "fast"], 2),
    "a broken rule": (["train", "tiny", "--nproc", "3"], 2),
    "a wrong command": (["trian"], 2),
}


@pytest.mark.alone
@pytest.mark.parametrize("what", QUICK)
def test_the_answer_comes_within_a_second_and_without_torch(what: str):
    """A second on a machine of usual speed."""
    assert least_seconds(partial(seconds_to_answer, *QUICK[what]), 1.0) < 1.0


def seconds_to_answer(words: list[str], code: int) -> float:
    begun = time.perf_counter()
    done = start(*words, runner=True)
    taken = time.perf_counter() - begun
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "no torch"
    return taken


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert run_command_line(words) == 0
        shown = capsys.readouterr().out
        assert all(f"moefold {name}" in shown for name in COMMANDS), words
    assert run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"moefold {__version__}\n"


def test_help_of_train_lists_every_key_with_its_default_and_meaning():
    done = start("train", "--help", "all")
    assert done.returncode == 0
    for key in iterate_keys(PRESETS["tiny"]()):
        assert f"  --{key.path} " in done.stdout, key.path
        assert key.doc in done.stdout, key.path
    assert "--nproc" in done.stdout
    assert "--resume" in done.stdout


@pytest.mark.parametrize(("wrong", "near"), [("trian", "train"), ("explian", "explain"), ("benhc", "bench")])
def test_an_unknown_command_is_refused_with_the_nearest_and_all_there_are(
    wrong: str, near: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command_line([wrong]) == 2
    message = capsys.readouterr().err
    assert f'no command "{wrong}" (did you mean "{near}"?)' in message
    assert all(name in message for name in COMMANDS)


@pytest.mark.parametrize("command", ["train", "explain", "plan", "doctor parity", "bench save"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.stps=3", 'no key "train.stps" (did you mean "train.steps"?)'),
        ("train.steps=many", "train.steps = many is not legal"),
        ("stps=3", 'stps" (did you mean'),
        ("train.steps=", 'train.steps = "" is not legal'),
    ],
)
def test_a_key_without_dashes_is_read_as_with_them(
    command: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
):
    refused: list[str] = []
    for written in (words, f"--{words}"):
        assert run_command_line([*command.split(), "tiny", written]) == 2
        refused.append(capsys.readouterr().err)
    assert message in refused[0]
    assert refused[0] == refused[1]


def test_keys_without_dashes_are_set(capsys: pytest.CaptureFixture[str]):
    explained: list[str] = []
    for words in ("tiny model.layers=3 data.seq_len=64", "model.layers=3 tiny --data.seq_len 64"):
        assert run_command_line(["explain", *words.split(), "--json"]) == 0
        explained.append(capsys.readouterr().out)
    assert explained[0] == explained[1]
    assert '"seq_len": 64' in explained[0]


@pytest.mark.parametrize(
    "words",
    ["--help", "presets --json", "explain tiny", "explain tiny --json", "train --help all", "simulate", "--version"],
)
def test_a_command_ends_quietly_where_its_reader_has_closed_the_pipe(words: str):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "moefold", *words.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=clean_env())
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize(("wrong", "near"), [("train.step", "train.steps"), ("parallel.etpp", "parallel.etp")])
def test_a_misspelt_key_is_refused_with_the_nearest(
    command: str, wrong: str, near: str, capsys: pytest.CaptureFixture[str]
):
    for words in ([f"--{wrong}=3"], [f"--{wrong}", "3"]):
        assert run_command_line([command, "tiny", *words]) == 2
        assert f'no key "{wrong}" (did you mean "{near}"?)' in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "near"), [("nprocs", "nproc"), ("resum", "resume"), ("output", "out")])
def test_a_misspelt_option_of_the_command_is_refused_with_the_nearest(
    wrong: str, near: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command_line(["train", "tiny", f"--{wrong}=2"]) == 2
    assert f'did you mean "--{near}"' in capsys.readouterr().err


def test_all_problems_are_told_at_once_each_on_its_line():
    done = start("train", "tiny", "--optim.lr=fast", "--train.step=3", "--model.attention.kv_heads=3")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 3, lines
    assert lines[0].startswith("moefold: optim.lr = fast")


@pytest.mark.parametrize("recipe", ["absent.yaml", "broken.yaml", "tny"])
def test_a_recipe_that_cannot_be_read_is_refused_by_name(recipe: str, tmp_path: Path):
    (tmp_path / "broken.yaml").write_text("train: [")
    done = start("train", recipe, cwd=tmp_path)
    assert done.returncode == 2
    assert recipe in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.yaml"], "nothing was written"


@pytest.mark.parametrize(
    ("words", "legal"),
    [
        (["--nproc", "3"], "set train.global_batch to a multiple of 6"),
        (["--nproc", "2", "--train.micro_batch", "3"], "set train.micro_batch to one of 1, 2, 4"),
        (["--nproc", "0"], "expected a whole number at least 1, such as 4"),
        (["--nproc", "-2"], "expected a whole number at least 1, such as 4"),
        (["--nproc", "10000000"], "expected a whole number at least 1"),
        (["--nproc", "4", "--parallel.tp", "3"], "start a multiple of 3 ranks, or choose a product among 1, 2, 4"),
    ],
)
def test_an_impossible_number_of_ranks_is_refused_with_legal_values(
    words: list[str], legal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert run_command_line(["train", "tiny", *words]) == 2
    assert legal in capsys.readouterr().err


def test_a_number_of_ranks_from_the_launcher_takes_part_in_the_rules():
    done = start("train", "tiny", RANK="0", WORLD_SIZE="3")
    assert done.returncode == 2
    assert "3 data-parallel ranks" in done.stderr
    silent = start("train", "tiny", RANK="1", WORLD_SIZE="3")
    assert (silent.returncode, silent.stderr) == (2, ""), "of several ranks that refuse the same, the first speaks"


def test_a_world_size_that_is_no_number_is_refused():
    done = start("train", "tiny", RANK="0", WORLD_SIZE="many")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_port_in_use_is_refused_by_number_with_another(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = start("train", "tiny", "--nproc", "2", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port} cannot be used" in done.stderr
    assert "expected a free one" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "no rank was started"


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999999999999"])
def test_a_port_that_does_not_exist_is_refused(port: str):
    done = start("train", "tiny", "--nproc", "2", "--port", port)
    assert done.returncode == 2
    assert f"port {port} cannot be used" in done.stderr


def test_a_free_port_can_be_bound():
    with socket.socket() as s:
        s.bind(("127.0.0.1", find_free_port()))


@pytest.mark.parametrize("words", [["--nproc"], ["--nproc", "x"], ["extra"], ["-x"], ["--optim.lr"]])
def test_words_a_command_cannot_use_end_with_exit_code_2(words: list[str]):
    done = start("explain", "tiny", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert words[0].lstrip("-").split("=")[0] in done.stderr + done.stdout


def test_python_dash_m_and_the_installed_command_are_the_same():
    command = Path(sys.executable).with_name("moefold")
    if not command.exists():
        pytest.skip("moefold is not installed as a command here")
    installed = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert installed.stdout == start("--help").stdout


def test_every_command_is_a_module_with_help():
    for name in COMMANDS:
        done = start(name, "--help")
        assert done.returncode == 0, done.stderr
        assert f"moefold {name}" in done.stdout


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    small = "--train.steps=1 --data.seq_len=16 --model.layers=1 --train.validate_sequences=1 --train.sample_tokens=0"
    (tmp_path / "corpus.txt").write_text("a line of text\n" * 6000)
    files = ["--data.source=files", f"--data.files={tmp_path / 'corpus.txt'}"]
    done = start("train", "tiny", "--out", str(tmp_path / "file" / "run"), *small.split(), *files)
    assert done.returncode == 2, done.stderr
    assert "file" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_key_of_the_configuration_can_be_set_from_the_command_line(capsys: pytest.CaptureFixture[str]):
    """Each at its default, in one command: none is shadowed by an option of the command itself."""
    words = [
        w for key in iterate_keys(Config()) for w in (f"--{key.path}", format_value(key.default).replace('""', ""))
    ]
    assert run_command_line(["explain", "tiny", "--json", *words]) == 0
    assert '"name": "custom"' in capsys.readouterr().out
