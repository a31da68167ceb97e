"""`moefold presets`: every preset with its sizes, in a table and as JSON."""

import json
import resource

import pytest

from moefold.cli.main import run_command_line
from moefold.presets.zoo import PRESETS
from tests.cli.test_main import start
from tests.support.machine_speed import least_seconds


def test_the_table_names_every_model_with_its_sizes(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["presets"]) == 0
    shown = capsys.readouterr().out
    models = [name for name in PRESETS if not name.endswith("-tiny")]
    lines = shown.splitlines()
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in models)
    assert max(map(len, lines)) <= 120
    (deepseek,) = [line for line in lines if line.startswith("deepseek-v3 ")]
    for part in ("671 G", "37.6 G", "61", "256 x 8", "mla", "3 dense layers", "shared expert", "sigmoid", "1 MTP"):
        assert part in deepseek, part
    (gpt,) = [line for line in lines if line.startswith("gpt-oss-20b ")]
    assert "gqa" in gpt
    assert "window of 128" in gpt


def test_json_has_every_preset_and_its_tiny_variant(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["presets"]}
    assert rows.keys() == PRESETS.keys()
    mixtral = rows["mixtral-8x7b"]
    assert mixtral["parameters"] == 46_702_792_704
    assert (mixtral["layers"], mixtral["experts"], mixtral["top_k"], mixtral["attention"]) == (32, 8, 2, "gqa")
    assert mixtral["active_parameters"] < mixtral["parameters"]


@pytest.mark.alone
def test_the_list_takes_less_than_half_a_second_and_no_torch():
    """Half a second of the processor on a machine of usual speed."""
    assert least_seconds(processor_seconds_of_list, 0.5) < 0.5


def processor_seconds_of_list() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = start("presets", runner=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.splitlines()[-1] == "no torch"
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_words_it_cannot_use_are_refused():
    done = start("presets", "--jsn")
    assert done.returncode == 2
    assert "jsn" in done.stderr
