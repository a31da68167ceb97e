"""Tiles inside exchanges, with ranks played by one process: by references on a CPU, by kernels in Triton's interpreter
with ranks in turns, and on a GPU as a person meets them."""

from __future__ import annotations

import json

import pytest
import torch

from moefold.bench.concurrent_ranks import TileRun
from moefold.bench.options import DispatchOptions
from moefold.bench.played_layer import DispatchCase, PlayedLayer
from moefold.bench.played_ranks import PlayedArena, played_arenas
from moefold.bench.tile_overlap import PlayedTiles, first_figures, second_figures
from moefold.cli.main import run_command_line
from moefold.kernels.experts.tiles_in_exchange import multiply_arrivals, return_products
from moefold.kernels.routing.arrival_pieces import TileRecords

RANKS, TOKENS, WIDTH, INNER, EXPERTS, K = 2, 40, 24, 12, 4, 2
OPTIONS = DispatchOptions(
    device="cpu", ranks=(RANKS,), hidden=(WIDTH,), tokens=TOKENS, experts=EXPERTS, top_k=K, dtype="fp32"
)
CASE = DispatchCase(RANKS, WIDTH, zipf=1.0)


class SignallingLayer(PlayedLayer):
    """A layer on a CPU whose kernels signal."""

    def make_arenas(self, size: int, pieces: int) -> list[PlayedArena]:
        return played_arenas(self.case.ranks, size, self.device, self.order, 0, pieces, signals=True)


def results_of_tokens(played: PlayedTiles, rank: int) -> torch.Tensor:
    """Each token through its experts, one by one."""
    held = EXPERTS // RANKS
    routing = played.layer.routings[rank]
    y = torch.zeros(TOKENS, WIDTH)
    for t, x in enumerate(played.layer.h_TD):
        for expert, weight in zip(routing.ids_TK[t].tolist(), routing.weights_TK[t].tolist(), strict=True):
            weights = played.weights[expert // held]
            gate, up = weights.gate_up_E2FD[expert % held] @ x
            y[t] += weights.down_EDF[expert % held] @ (torch.nn.functional.silu(gate) * up * weight)
    return y


def require_right_results(played: PlayedTiles, results: list[torch.Tensor]) -> None:
    for rank, found in enumerate(results):
        torch.testing.assert_close(found, results_of_tokens(played, rank), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="references are played on a CPU")
def test_played_references_give_every_token_its_experts():
    played = PlayedTiles(PlayedLayer(OPTIONS, CASE, "cpu"), INNER)
    activations = played.layer.play(played.multiply)
    results = played.layer.play(lambda rank: played.give_back(activations, rank))
    require_right_results(played, results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_played_kernels_give_the_same_and_note_when_tiles_and_pieces_were_done():
    pytest.importorskip("triton")
    played = PlayedTiles(SignallingLayer(OPTIONS, CASE, "cpu"), INNER)
    for experts in played.experts:
        experts.multiply_arrivals = multiply_arrivals.implementations["triton"]
        experts.return_products = return_products.implementations["triton"]
    run = TileRun(programs=3, senders=2, apart=True)
    activations, records = played.run_apart(played.multiply, run)
    figures = first_figures(records, run.programs)
    assert 0 < figures.sending < figures.whole
    results, records = played.run_apart(lambda rank: played.give_back(activations, rank), run)
    require_right_results(played, results)
    figures = second_figures(records, run.senders)
    assert 0 < figures.sending < figures.whole
    assert figures.exposed == figures.sending  # apart, nothing is hidden


UNUSED = [0, 0, 0]


def records_of(tiles: list[list[int]], pieces: list[list[int]]) -> TileRecords:
    return TileRecords(torch.tensor([*tiles, UNUSED]), torch.tensor(pieces), torch.zeros(1, dtype=torch.int64))


def test_waits_of_programs_expose_what_arrives():
    """Pieces are sent from 10 to 50; of two programs on each of two ranks one waits for 10, another for 6."""
    ranks = [
        records_of([[11, 21, 40], [12, 12, 60]], [[10, 10, 30], UNUSED]),
        records_of([[11, 17, 45], [45, 45, 70]], [[12, 12, 50], UNUSED]),
    ]
    figures = first_figures(ranks, programs=2)
    assert figures == (60, 40, (10 / 2 + 6 / 2) / 2)
    assert figures.hidden == 1 - 4 / 40


def test_what_is_sent_to_others_behind_the_last_tile_is_exposed():
    """Two programs of a rank sum two pieces for the other rank, and two for their own: for 10 and 20 on one rank, of
    which 5 are behind its last tile, and for 6 and 8 on the other, of which all 8 are."""
    ranks = [
        records_of([[0, 0, 45]], [[1, 20, 30], [1, 30, 50], [50, 50, 60], [50, 50, 60]]),
        records_of([[2, 2, 60]], [[1, 50, 56], [1, 62, 70], [60, 60, 62], UNUSED]),
    ]
    figures = second_figures(ranks, programs=2)
    assert figures == (70, (30 / 2 + 14 / 2) / 2, (5 / 2 + 8 / 2) / 2)
    assert figures.hidden == 1 - 6.5 / 22


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_both_products_hide_some_of_what_travels(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "overlap", "--device", "cuda", "--senders", "4", "--repeat", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["product"] for row in rows] == ["first", "second"] * 2
    for row in rows:
        assert 0 < row["sending_ms"] < row["together_ms"]
        assert row["hidden"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_tiles_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "overlap", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err
