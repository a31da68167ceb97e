"""`moefold bench dispatch` as a person meets it, and played ranks in turns."""

from __future__ import annotations

import json
import time

import pytest
import torch

from moefold.bench.played_ranks import TurnOrder, play_ranks
from moefold.cli.main import run_command_line

SMALL = [
    *("--device", "cpu"),
    *("--experts", "8"),
    *("--top-k", "2"),
    *("--tokens", "16"),
    *("--hidden", "32"),
    *("--repeat", "1"),
]
PAUSES = (0.01, 0.2)  # seconds that played ranks run


def test_a_row_for_each_case(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "dispatch", *SMALL, "--ranks", "2", "4", "--zipf", "0.0", "--json"]) == 0
    two, four = json.loads(capsys.readouterr().out)["results"]
    assert (two["ranks"], four["ranks"]) == (2, 4)
    assert 16 <= two["rows"] < four["rows"] <= 32  # with two choices a token has one row or two
    assert two["mb"] == pytest.approx((16 + two["rows"]) * 32 * 4 / 1e6)
    assert two["dispatch_share"] > 0
    assert two["launches"] > 1
    assert run_command_line(["bench", "dispatch", *SMALL, "--ranks", "2", "--zipf", "1.0"]) == 0
    assert "bandwidth of a copy" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forward_is_five_launches_on_a_gpu(capsys: pytest.CaptureFixture[str]):
    sizes = ["--hidden", "256", "--tokens", "500", "--repeat", "2", "--ranks", "2", "4", "--zipf", "0.0"]
    assert run_command_line(["bench", "dispatch", "--device", "cuda", *sizes, "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["results"]:
        assert row["launches"] == 5


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "dispatch", "--ranks", "3"]) == 2
    assert "--ranks 3" in capsys.readouterr().err


def test_an_exchange_passes_the_turn_on():
    order = TurnOrder(3)
    seen: list[str] = []

    def work(rank: int) -> int:
        seen.append(f"{rank} writes")
        order.pass_on(rank)
        seen.append(f"{rank} reads")
        return rank

    for _ in range(2):
        seen.clear()
        assert play_ranks(work, 3, order) == [0, 1, 2]
        assert seen == [f"{rank} {does}" for does in ("writes", "reads") for rank in range(3)]


def test_the_seconds_of_a_rank_leave_out_those_of_the_others():
    order = TurnOrder(2)

    def work(rank: int) -> float:
        begun = order.seconds_so_far(rank)
        time.sleep(PAUSES[rank])
        order.pass_on(rank)
        return order.seconds_so_far(rank) - begun

    short, long = play_ranks(work, 2, order)
    assert PAUSES[0] <= short < PAUSES[1] <= long
