"""`moefold plan` as a person meets it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import run_command_line

LAYOUT = ("deepseek-v3", "--gpus", "256", "--gpu", "gb200", "--parallel.pp", "4", "--pipeline.vpp", "4")
PUBLISHED = (*LAYOUT, "--parallel.ep", "64", "--gbs", "8192", "--precision", "mxfp8", "--recompute", "mlp")
KEYS = ("flops_per_token", "step_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu", "memory_gib", "memory_by_rank")


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]):
    def plan(*words: str) -> dict[str, Any]:
        assert run_command_line(["plan", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

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
        (("deepseek-v3", "--gpus", "4", "--gpu", "a100"), "no layout of deepseek-v3 fits 4 x A100"),
        (("tiny", "--precision", "fp7"), 'no precision "fp7"'),
        (("tiny", "--sharding", "full"), "sharding = full is not legal"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(words: tuple[str, ...], says: str, capsys: Any):
    assert run_command_line(["plan", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_gpu_of_ones_own(tmp_path: Path, planned: Any):
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100\nname: twice\npeak: {bf16: 1979e12, fp8: 3958e12}\n")
    words = ("mixtral-8x7b", "--gpus", "8", "--parallel.ep", "8")
    mine, h100 = planned(*words, "--gpu", str(path)), planned(*words, "--gpu", "h100")
    assert mine["gpu"] == "twice"
    assert mine["step_s"] < h100["step_s"]


def test_it_starts_at_once_and_without_torch():
    """Half a second on a quiet machine; what counts here is this process's own time, and that torch stays out."""
    code = (
        "import sys, time; from moefold.cli.main import run_command_line; "
        "run_command_line(['plan', 'tiny', '--gpus', '1', '--parallel.pp', '1', '--json']); "
        "assert 'torch' not in sys.modules; print(time.process_time(), file=sys.stderr)"
    )
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stderr.split()[-1]) < 1.0
    assert time.perf_counter() - begun < 30
