"""Projections inside exchanges, of tensor-parallel ranks and of those that swap positions for heads, with ranks played
by one process: by kernels in Triton's interpreter with ranks in turns, and on a GPU as a person meets them."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from moefold.bench.head_overlap import PlayedHeads
from moefold.bench.played_products import (
    OverlapFigures,
    PlayedProducts,
    PlayedSetting,
    ProjectionSizes,
    Work,
    require_near,
    span_of_records,
    waits_of,
)
from moefold.bench.projection_overlap import PlayedProjections
from moefold.cli.main import run_command_line
from moefold.kernels.routing.arrival_pieces import TileRecords

SIZES = ProjectionSizes(24, (32, 8, 8), 16)
SETTING = PlayedSetting(torch.device("cpu"), torch.float32, tokens=10, ranks=2)
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")


def played_in_turns(played: PlayedProducts, work: Work) -> list[list[torch.Tensor]]:
    """What each rank gives, with times of its tiles."""
    records = played.set_signals(programs=3, senders=1, apart=True)
    results = played.play(work)
    assert span_of_records(records) > 0
    return results


@INTERPRETED
def test_played_kernels_give_the_projections_of_all_ranks_and_note_when_tiles_were_done():
    played = PlayedProjections(SIZES, SETTING)
    gathered = played_in_turns(played, played.gather)
    summed = played_in_turns(played, played.scatter)
    for rank in range(SETTING.ranks):
        require_near(gathered[rank], played.gathered(rank))
        require_near(summed[rank], played.summed(rank))


@INTERPRETED
def test_played_kernels_give_the_heads_of_all_ranks_and_note_when_tiles_were_done():
    played = PlayedHeads(SIZES, SETTING)
    made = played_in_turns(played, played.to_heads)
    joined = played_in_turns(played, played.from_heads)
    for rank in range(SETTING.ranks):
        require_near(made[rank], played.heads(rank))
        require_near(joined[rank], played.joined(rank))


def test_waits_are_what_is_not_hidden_and_a_longer_product_is_what_is_not_gained():
    tiles = torch.tensor([[11, 21, 40], [12, 12, 60], [0, 0, 0]])
    record = TileRecords(tiles, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert waits_of(record) == 10
    figures = OverlapFigures(exchange=40.0, product=100.0, together=120.0, waited=10.0)
    assert (figures.hidden, figures.gained) == (0.75, 0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("products", "pair"), [("projections", ["gathered", "scattered"]), ("heads", ["to heads", "from heads"])]
)
def test_on_a_gpu_projections_hide_most_of_what_travels(
    products: str, pair: list[str], capsys: pytest.CaptureFixture[str]
):
    command = ["bench", "overlap", "--device", "cuda", "--products", products, "--senders", "8", "--repeat", "2"]
    assert run_command_line([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["product"] for row in rows] == pair * 2
    for row in rows:
        assert 0 < row["product_ms"] < 1.1 * row["together_ms"], "the card lowers its clock between the two"
        assert row["hidden"] > 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("products", ["projections", "heads"])
def test_without_a_gpu_projections_are_refused(products: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "overlap", "--device", "cuda", "--products", products]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err
