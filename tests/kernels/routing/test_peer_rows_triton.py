"""The Triton kernels of rows between ranks, run by Triton's interpreter where there is no GPU: one process plays all
ranks, with their rooms side by side."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.routing import peer_rows_triton
from moefold.kernels.routing.peer_rows import count_parcels, drawn_ranks, place_parcels, push_peer_rows, sum_peer_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D = 20


def test_tokens_of_several_blocks_are_placed_one_behind_the_other():
    tokens = 2 * peer_rows_triton.TOKENS + 9
    rank_TK = drawn_ranks(tokens, 2, 3, DEVICE)
    tokens_sn = torch.tensor([[5, 0, 7], [0, 1, 0], [0, 0, 0]], device=DEVICE)
    assert torch.equal(peer_rows_triton.launch_count_parcels(rank_TK, 3), count_parcels(rank_TK, 3))
    slots_Tn = peer_rows_triton.launch_place_parcels(rank_TK, tokens_sn, 2, 100)
    assert torch.equal(slots_Tn, place_parcels(rank_TK, tokens_sn, 2, 100))


@pytest.mark.parametrize(("tokens", "k", "ranks", "room"), [(1, 1, 2, 1.0), (0, 2, 3, 1.0), (9, 4, 3, 0.6)])
def test_the_trip_of_tokens_of_all_ranks_is_that_of_the_references(tokens: int, k: int, ranks: int, room: float):
    chosen = [drawn_ranks(tokens, k + rank, ranks, DEVICE)[:, :k].contiguous() for rank in range(ranks)]
    counts = [peer_rows_triton.launch_count_parcels(rank_TK, ranks) for rank_TK in chosen]
    for mine, rank_TK in zip(counts, chosen, strict=True):
        assert torch.equal(mine, count_parcels(rank_TK, ranks))
    tokens_sn = torch.stack([mine[0] for mine in counts])
    most = int(room * tokens_sn.sum(0).max())
    generator = torch.Generator().manual_seed(tokens)
    sources = [torch.randn(tokens, D, generator=generator).to(DEVICE) for _ in range(ranks)]
    rooms = [torch.zeros(most + 1, D, device=DEVICE) for _ in range(ranks)]
    expected_rooms = [torch.zeros(most + 1, D, device=DEVICE) for _ in range(ranks)]
    placed = []
    for sender, (rank_TK, x_TD) in enumerate(zip(chosen, sources, strict=True)):
        slots_Tn = peer_rows_triton.launch_place_parcels(rank_TK, tokens_sn, sender, most)
        assert torch.equal(slots_Tn, place_parcels(rank_TK, tokens_sn, sender, most))
        peer_rows_triton.launch_push_peer_rows(x_TD, slots_Tn, rooms)
        push_peer_rows(x_TD, slots_Tn, expected_rooms)
        placed.append(slots_Tn)
    for mine, expected in zip(rooms, expected_rooms, strict=True):
        assert torch.equal(mine[:most], expected[:most])
    for slots_Tn in placed:
        sums = peer_rows_triton.launch_sum_peer_rows(rooms, slots_Tn)
        torch.testing.assert_close(sums, sum_peer_rows(rooms, slots_Tn), rtol=1e-6, atol=1e-6)
