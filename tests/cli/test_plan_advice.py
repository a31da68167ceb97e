"""`moefold plan` says what stands beside its figures: the error band, a warning, the advice."""

import json

import pytest

from moefold.cli.main import run_command_line

LAYOUT = ["plan", "qwen3-30b-a3b", "--gpus", "64", "--gbs", "512", "--parallel.pp", "4", "--parallel.ep", "8"]


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command_line(words) == 0
    return " ".join(capsys.readouterr().out.split())


def test_every_answer_has_its_band_and_advice(capsys: pytest.CaptureFixture[str]):
    found = json.loads(shown([*LAYOUT, "--gpu", "h100", "--json"], capsys))
    band = found["error_band"]
    assert band["low"] < found["tokens_per_s_per_gpu"] < band["high"]
    assert not band["warning"]
    text = shown([*LAYOUT, "--gpu", "h100"], capsys)
    assert f"expect {band['low']:,.0f} to {band['high']:,.0f} tokens/s a GPU" in text
    assert "warning" not in text
    for advice in found["advice"]:
        assert f"- {advice['about']}: {advice['text']} ({advice['source']})" in text


@pytest.mark.parametrize(
    ("gpu", "says"), [("b200", "too fast in the median of"), ("a100", "never compared with a run")]
)
def test_a_card_that_plans_are_wrong_for_is_warned_about(gpu: str, says: str, capsys: pytest.CaptureFixture[str]):
    assert f"warning: plans for {gpu.upper()} " in (text := shown([*LAYOUT, "--gpu", gpu], capsys))
    assert says in text
