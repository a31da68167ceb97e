"""Kept launches of kernels: what they are compiled for, and on a GPU that those of known tensors do the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels import kept_launch_triton
from moefold.kernels.kept_launch_triton import BoundArguments, KeptLaunch, three_sizes
from moefold.kernels.routing.peer_rows import drawn_slots, sum_peer_rows
from moefold.kernels.routing.peer_rows_triton import bind_sum, launch_sum_peer_rows
from moefold.layout.peer_rooms import PeerRooms

STREAM = 7


def test_a_compiled_kernel_is_given_three_sizes_of_a_grid():
    assert [three_sizes(grid) for grid in ((5,), (5, 2), (5, 2, 3))] == [(5, 1, 1), (5, 2, 1), (5, 2, 3)]


class Compiled:
    """Stands for a kernel that Triton has compiled: it notes what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def run(self, *arguments: object) -> None:
        self.calls.append(arguments)


class Launched:
    """Stands for a kernel of Triton's: it notes how often it compiles, and with how many warps."""

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.warps: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*_: object, num_warps: int) -> Compiled:
            self.warps.append(num_warps)
            return self.compiled

        return launch


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(kept_launch_triton, "driver", SimpleNamespace(active=active))


def test_tensors_of_other_types_and_alignments_are_compiled_for_and_others_are_not(one_stream: None):
    kernel, x, y, table = Launched(), torch.zeros(64), torch.ones(64), torch.ones(2)
    launch = KeptLaunch(kernel, (7, 2), BoundArguments((table,), (3, True)), 4)
    launch(x)
    launch(y)
    launch(x[4:])
    handles = (7, 2, 1, STREAM, "function", "metadata", None, None, None)
    assert kernel.compiled.calls == [(*handles, tensor.data_ptr(), table.data_ptr(), 3, True) for tensor in (y, x[4:])]
    for tensor in (x.double(), x[1:]):
        launch(tensor)
    assert kernel.warps == [4, 4, 4]
    assert len(kernel.compiled.calls) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [16, 33])
def test_a_known_launch_reads_and_writes_the_tensors_that_it_is_told(tokens: int):
    rooms = PeerRooms(torch.empty(tokens + 1, 32, device="cuda") for _ in range(2))
    for _ in range(3):
        for room in rooms:
            room.normal_()
        slots = drawn_slots(tokens, 2, "cuda")
        sums = launch_sum_peer_rows(rooms, slots)
        torch.testing.assert_close(sums, sum_peer_rows(rooms, slots))
    assert len(rooms.keep(bind_sum, tokens).compiled) == 1
