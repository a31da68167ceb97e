"""`moefold plan` as a person meets it."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import run_command_line
from moefold.presets.recipe import resolve_recipe
from tests.support.machine_speed import least_seconds

LAYOUT = ("deepseek-v3", "--gpus", "256", "--gpu", "gb200", "--parallel.pp", "4", "--pipeline.vpp", "4")
PUBLISHED = (*LAYOUT, "--parallel.ep", "64", "--gbs", "8192", "--precision", "mxfp8", "--recompute", "mlp")
KEYS = ("flops_per_token", "step_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu", "memory_gib", "memory_by_rank")


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]):
    def plan(*words: str) -> dict[str, Any]:
        code = run_command_line(["plan", *words, "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert code == (0 if answer["fits"] else 3)
        return answer

    return plan


def test_json_has_the_numbers(planned: Any):
    found = planned(*PUBLISHED, "--graphs", "static")
    assert all(key in found for key in KEYS)
    assert found["flops_per_token"] == pytest.approx(260.0e9, rel=0.01)
    assert len(found["memory_by_rank"]) == 4
    assert found["memory_gib"] == max(found["memory_by_rank"])
    assert found["tflops_per_gpu"] == pytest.approx(1048, rel=0.15)  # 000 Table 11
    assert "layouts" not in found


def test_short_forms_are_configuration_keys(planned: Any):
    words = ("tiny", "--gpus", "2", "--gpu", "a100", "--parallel.ep", "2")
    short = planned(*words, "--seq", "512", "--mbs", "2", "--gbs", "8", "--dispatcher", "all_to_all", "--overlap")
    long = planned(
        *words,
        *("--data.seq_len", "512", "--train.micro_batch", "2", "--train.global_batch", "8"),
        *("--parallel.dispatcher", "all_to_all", "--pipeline.pair", "true"),
    )
    assert short == long


def test_shares_that_were_never_timed_carry_a_warning(planned: Any, capsys: pytest.CaptureFixture[str]):
    words = ("olmoe-1b-7b", "--gpu", "h200", "--parallel.ep", "1", "--model.layers", "2", "--gpus")
    sharded = ("--shard.mode", "zero3")
    assert (
        planned(*words, "2")["error_band"]["warning"] == planned(*words, "1", *sharded)["error_band"]["warning"] == ""
    )
    estimate = "never timed on several GPUs, so that these times are an estimate: full sharding"
    assert planned(*words, "2", *sharded)["error_band"]["warning"] == estimate
    both = planned(*words, "16", "--shard.replicas", "2", "--shard.sync", "hierarchical")["error_band"]["warning"]
    assert both.endswith("estimate: several copies of shares, sums in two levels")
    assert run_command_line(["plan", *words, "2", *sharded]) == 0
    assert f"warning: {estimate}" in " ".join(capsys.readouterr().out.split())


def test_a_search_lists_layouts(planned: Any):
    found = planned("qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--search", "--best", "3")
    assert 1 <= len(found["layouts"]) <= 3
    assert found["layouts"][0]["step_s"] == found["step_s"]


def test_tables_say_what_json_says(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["plan", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200", "--best", "2"]) == 0
    shown = capsys.readouterr().out
    for word in ("s a step", "TFLOP/s", "communication wall", "on the largest rank", "best of", "left out", "days"):
        assert word in " ".join(shown.split())


def test_explain_shows_the_arithmetic(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["plan", "tiny", "--gpus", "1", "--gpu", "a100", "--parallel.pp", "1", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "gate_up: 8 x (" in shown
    assert "tokens/s a GPU" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tiny", "--gpu", "h101"), 'no GPU "h101"'),
        (("tiny", "--gpu", "none.yaml"), "no file none.yaml"),
        (("tiny", "--gpus", "4", "--parallel.tp", "3"), "parallel.tp = 3 does not divide"),
        (("tiny", "--precision", "fp7"), 'no precision "fp7"'),
        (("tiny", "--sharding", "full"), "sharding = full is not legal"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(words: tuple[str, ...], says: str, capsys: Any):
    assert run_command_line(["plan", *words]) == 2
    assert says in capsys.readouterr().err


def test_what_does_not_fit_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["plan", "mixtral-8x7b", "--gpus", "4", "--gpu", "a100"]) == 3
    said = capsys.readouterr().err
    assert "no layout of mixtral-8x7b fits 4 x A100" in said
    assert "nearest to fitting: tp" in said
    assert re.search(r"use \d+ GPUs", said)


def test_a_layout_that_does_not_fit_says_what_would_and_greys_out_its_cost(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "8", "--mbs", "4", "--gbs", "64", "--parallel.ep", "8"]
    assert run_command_line(words) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit 79 GiB what" not in shown
    assert re.search(r"if it fitted: 1e\+12 tokens in [\d.,]+ days, [\d,]+ GPU hours, about \$", shown)
    assert "what fits: --recompute layer --train.micro_batch 1" in shown
    assert re.search(r"--train.micro_batch 1 --gpus \d+", shown)
    assert "torchrun" not in shown
    fitting = ["plan", "qwen3-30b-a3b", "--gpus", "16", "--gbs", "128", "--mbs", "1", "--parallel.ep", "8"]
    assert run_command_line(fitting) == 0
    assert "if it fitted" not in capsys.readouterr().out


def test_launch_files_are_what_the_trainer_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["tiny", "--gpus", "4", "--gpu", "a100", "--best", "1", "--tokens", "1e6"]
    folder = tmp_path / "launch"
    assert run_command_line(["plan", *words, "--write", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "torchrun.sh", "run.sbatch"}
    assert answer["launch"] == {path.name: path.read_text() for path in folder.iterdir()}
    config = resolve_recipe(str(folder / "config.yaml"), (), 4)
    layout = answer["layout"]
    assert {name: getattr(config.parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")} == {
        name: layout[name] for name in ("tp", "cp", "pp", "ep", "etp")
    }
    assert config.train.precision == "bf16"
    assert config.train.steps == math.ceil(1e6 / answer["tokens_per_step"])
    assert run_command_line(["explain", str(folder / "config.yaml"), "--nproc", "4"]) == 0
    capsys.readouterr()
    again = ["plan", *words, "--write", str(folder)]
    assert run_command_line(again) == 2
    assert "has config.yaml" in capsys.readouterr().err


@pytest.mark.extended
def test_a_written_config_trains(tmp_path: Path):
    """One step on a CPU, started by the arguments of the torchrun line."""
    words = ["tiny", "--gpus", "1", "--gpu", "a100", "--parallel.pp", "1", "--train.steps", "1"]
    assert run_command_line(["plan", *words, "--train.global_batch", "4", "--write", str(tmp_path)]) == 0
    line = (tmp_path / "torchrun.sh").read_text().splitlines()[-1]
    command, arguments = line.split(" -m ")
    assert command == "torchrun --nproc-per-node 1"
    on_cpu = "--train.device cpu --train.precision fp32 --data.seq_len 64 --train.validate_sequences 4"
    whole = [sys.executable, "-m", *arguments.split(), *on_cpu.split()]
    done = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


def test_choices_that_the_trainer_lacks_are_marked_and_not_written(tmp_path: Path, capsys: Any):
    words = ["plan", "qwen3-30b-a3b", "--gpus", "16", "--parallel.ep", "8", "--mbs", "1", "--precision", "fp8"]
    assert run_command_line([*words, "--write", str(tmp_path / "launch")]) == 2
    printed = capsys.readouterr()
    assert "not in the trainer yet: precision fp8" in printed.out
    assert "nothing was written" in printed.err
    assert not (tmp_path / "launch").exists()


def test_a_gpu_of_ones_own(tmp_path: Path, planned: Any):
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100\nname: twice\npeak: {bf16: 1979e12, fp8: 3958e12}\n")
    words = ("mixtral-8x7b", "--gpus", "8", "--parallel.ep", "8")
    mine, h100 = planned(*words, "--gpu", str(path)), planned(*words, "--gpu", "h100")
    assert mine["gpu"] == "twice"
    assert mine["step_s"] < h100["step_s"]


@pytest.mark.alone
def test_it_starts_at_once_and_without_torch():
    """Half a second on a quiet machine, and at most one of this process's own time on a machine of usual speed."""
    assert least_seconds(processor_seconds_of_plan, 1.0) < 1


def processor_seconds_of_plan() -> float:
    code = (
        "import sys, time; from moefold.cli.main import run_command_line; "
        "run_command_line(['plan', 'tiny', '--gpus', '1', '--parallel.pp', '1', '--json']); "
        "assert 'torch' not in sys.modules; print(time.process_time(), file=sys.stderr)"
    )
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - begun < 30
    return float(done.stderr.split()[-1])
