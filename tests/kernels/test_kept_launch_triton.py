"""Launches of compiled kernels: what they are known by, and on a GPU that known ones do the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels import kept_launch_triton
from moefold.kernels.kept_launch_triton import launch_kept, launch_key, three_sizes
from moefold.kernels.routing.peer_rows import drawn_slots, sum_peer_rows
from moefold.kernels.routing.peer_rows_triton import launch_sum_peer_rows


def test_other_types_alignments_and_numbers_are_other_launches_and_other_addresses_are_not():
    x = torch.zeros(64)
    same = launch_key((x,), (3, True))
    assert launch_key((torch.ones(8),), (3, True)) == same
    others = [(x.double(), (3, True)), (x[1:], (3, True)), (x, (16, True)), (x, (3, False)), (x, (3, True, 1))]
    keys = {launch_key((tensor,), given) for tensor, given in others}
    assert len(keys) == len(others)
    assert same not in keys
    assert launch_key((x[4:],), (3, True)) == same


def test_a_compiled_kernel_is_given_three_sizes_of_a_grid():
    assert [three_sizes(grid) for grid in ((5,), (5, 2), (5, 2, 3))] == [(5, 1, 1), (5, 2, 1), (5, 2, 3)]


class Compiled:
    """Stands for a kernel that Triton has compiled: it notes its grid and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((grid, *arguments))


class Launched:
    """Stands for a kernel of Triton's: it notes how often it is asked, and with how many warps."""

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.warps: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*_: object, num_warps: int) -> Compiled:
            self.warps.append(num_warps)
            return self.compiled

        return launch


def test_a_known_launch_goes_to_the_compiled_kernel_and_any_other_through_triton():
    known_launches = kept_launch_triton.known_launches
    known_launches.clear()
    kernel, x, y = Launched(), torch.zeros(64), torch.ones(64)
    launch_kept(kernel, (5,), (x,), (3, True), 4)
    launch_kept(kernel, (7, 2), (y,), (3, True), 4)
    assert kernel.compiled.calls == [((7, 2, 1), y, 3, True)]
    for tensor, numbers, warps in ((x, (4, True), 4), (x, (3, True), 8), (x[1:], (3, True), 4)):
        launch_kept(kernel, (5,), (tensor,), numbers, warps)
    assert kernel.warps == [4, 4, 8, 4]
    assert len(kernel.compiled.calls) == 1
    for size in range(10, 10 + kept_launch_triton.MOST_KNOWN):
        launch_kept(kernel, (5,), (x,), (size, True), 4)
    assert 0 < len(known_launches) < 10, "sizes that change take no memory"
    known_launches.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [16, 33])
def test_a_known_launch_reads_and_writes_the_tensors_that_it_is_given(tokens: int):
    kept_launch_triton.known_launches.clear()
    slots = drawn_slots(tokens, 2, "cuda")
    for _ in range(3):
        rooms = [torch.randn(tokens + 1, 32, device="cuda") for _ in range(2)]
        sums = launch_sum_peer_rows(rooms, slots)
        torch.testing.assert_close(sums, sum_peer_rows(rooms, slots))
    assert len(kept_launch_triton.known_launches) == 1
