"""The Triton kernels of rows between ranks, run by Triton's interpreter where there is no GPU: one process plays all
ranks, with their rooms side by side."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.routing import peer_rows_triton
from moefold.kernels.routing.exchange_tail import ExchangeTail
from moefold.kernels.routing.peer_rows import (
    drawn_slots,
    push_peer_rows,
    sum_peer_rows,
    sum_rows_into,
    write_choices_into,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D = 20
SIZES = [(1, 2), (0, 3), (9, 3), (230, 2)]  # tokens, ranks


def played_tail(ranks: int, me: int) -> tuple[ExchangeTail, torch.Tensor]:
    """A tail whose signals are all given, and the words of all ranks."""
    words = torch.zeros(ranks, ranks + 2, dtype=torch.int64, device=DEVICE)
    words[me, :ranks] = 2**40
    addresses = torch.tensor([line.data_ptr() for line in words], device=DEVICE)
    fault = torch.zeros(2, dtype=torch.int64, pin_memory=DEVICE == "cuda")
    finished = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return ExchangeTail(addresses, fault, finished, words[me, -1:], me, 5.0), words


@pytest.mark.parametrize(("tokens", "ranks"), SIZES)
def test_tokens_go_to_rooms_and_back_as_by_the_references(tokens: int, ranks: int):
    generator = torch.Generator().manual_seed(tokens)
    most = tokens + 1
    slots = drawn_slots(tokens, ranks, DEVICE)
    x = torch.randn(tokens, D, generator=generator).to(DEVICE)
    chosen = torch.tensor([-1, 1, 0], dtype=torch.int32, device=DEVICE)[:ranks]
    for room_s in (None, chosen):
        rooms, expected = ([torch.zeros(3, most + 1, D, device=DEVICE) for _ in range(ranks)] for _ in range(2))
        peer_rows_triton.launch_push_peer_rows(x, slots, rooms, 2, room_s)
        push_peer_rows(x, slots, expected, 2, room_s)
        for mine, plain in zip(rooms, expected, strict=True):
            assert torch.equal(mine[:, :most], plain[:, :most])
    turn = [room[2] for room in rooms]
    sums = peer_rows_triton.launch_sum_peer_rows(turn, slots)
    torch.testing.assert_close(sums, sum_peer_rows(turn, slots), rtol=1e-6, atol=1e-6)


def test_the_last_program_of_a_kernel_gives_the_signals_once():
    ranks, me = 3, 1
    tail, words = played_tail(ranks, me)
    slots = drawn_slots(230, ranks, DEVICE)
    x = torch.ones(230, D, device=DEVICE)
    rooms = [torch.zeros(2, 231, D, device=DEVICE) for _ in range(ranks)]
    for number in (1, 2):
        peer_rows_triton.launch_push_peer_rows(x, slots, rooms, 0, None, tail)
        assert tail.is_given
        assert words[:, me].tolist() == [number] * ranks
        assert tail.finished.tolist() == [0]
    few = slots[:9].clamp(min=0)
    peer_rows_triton.launch_sum_rows_into(x, few, [rooms[1][0], rooms[0][0]], 1, tail)
    assert words[0].tolist() == [0, 3, 0, 0, 0]
    assert words[me, ranks:].tolist() == [3, 0]
    expected = torch.zeros_like(rooms[0][0])
    sum_rows_into(x, few, [expected], 0)
    assert torch.equal(rooms[0][0][:9], expected[:9])
    assert tail.fault_2.tolist() == [0, 0]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (0, 3), (9, 3), (700, 2)])
def test_numbers_of_choices_are_written_in_their_places_with_the_signals(n: int, k: int):
    tail, words = played_tail(2, 0)
    slots = drawn_slots(n, k, DEVICE)
    x = torch.randn(n + 1, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    rooms = [torch.full((n + 2, k), 7.0, device=DEVICE) for _ in range(2)]
    expected = rooms[0].clone()
    peer_rows_triton.launch_write_choices_into(x, slots, rooms, 0, tail)
    write_choices_into(x, slots, [expected], 0)
    assert torch.equal(rooms[0], expected)
    assert (rooms[1] == 7).all()
    assert words[1].tolist() == [int(n > 0), 0, 0, 0]
    assert tail.is_given == (n > 0)
