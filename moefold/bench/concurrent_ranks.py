"""Kernels of played ranks that run at once: each rank has its share of the processors and a stream, sends to the others
and waits for them, as on a GPU of its own. What they write down of their times is read here too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from moefold.bench.machine import synchronize_device
from moefold.bench.played_ranks import EVERY_SIGNAL
from moefold.comm.arena import words_of
from moefold.dispatch.device_arena import FURTHER_WORDS, DeviceArena
from moefold.dispatch.tiled_experts import signals_of_arena
from moefold.kernels.routing.arrival_pieces import PieceSignals, TileRecords, empty_records

T = TypeVar("T")
GIVEN = 2**60  # the number of an exchange that is never reached
PAUSE_CYCLES = (
    200_000_000  # of the device, about a tenth of a second, in which the host launches the kernels of all ranks
)
MILLISECOND = 1e6  # of nanoseconds


class TileRun(NamedTuple):
    """How kernels run: programs of a rank, of which some send, and whether sending is a launch of its own."""

    programs: int
    senders: int
    apart: bool


class ConcurrentRanks:
    """The arenas of all ranks, whose words have flags, and a stream for each rank."""

    def __init__(self, arenas: Sequence[DeviceArena]):
        self.arenas = arenas

    @property
    def device(self) -> torch.device:
        return self.arenas[0].memory.parts[0].device

    @cached_property
    def streams(self) -> list[torch.cuda.Stream]:
        """Memory that kernels of a rank have used is kept for its stream."""
        return [torch.cuda.Stream() for _ in self.arenas]

    def fill_flags(self, number: int) -> None:
        """Set the flags of all pieces on all ranks. Signals of ranks have all been given."""
        ranks = len(self.arenas)
        for rank, arena in enumerate(self.arenas):
            memory = arena.memory
            words = words_of(memory.parts[rank], memory.sizes)
            words[:ranks] = EVERY_SIGNAL
            words[ranks + FURTHER_WORDS :] = number

    def signals(self, run: TileRun, lines: Sequence[tuple[int, int]]) -> list[PieceSignals]:
        """Signals for every rank, with records of as many tiles and pieces, whose clock is the same for all."""
        records = [empty_records(tiles, pieces, self.device) for tiles, pieces in lines]
        shared = [each._replace(ticks=records[0].ticks) for each in records]
        return [
            signals_of_arena(arena, run.programs, run.senders, apart=run.apart, records=each)
            for arena, each in zip(self.arenas, shared, strict=True)
        ]

    def launch_together(self, launch: Callable[[int], T]) -> list[T]:
        """What each rank launches, on its stream."""
        results: list[T] = []
        hold_streams(self.streams)
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                results.append(launch(rank))
        synchronize_device(self.device.type)
        for arena in self.arenas:
            arena.require_peers()
        return results


def hold_streams(streams: list[torch.cuda.Stream]) -> None:
    """What is launched on these streams from now on begins on all at once, behind a pause of the device."""
    torch.cuda._sleep(PAUSE_CYCLES)
    event = torch.cuda.Event()
    event.record()
    for stream in streams:
        stream.wait_event(event)


def records_of(signals: Sequence[PieceSignals]) -> list[TileRecords]:
    return [each.records for each in signals if each.records is not None]


def used_lines(times_N3: Tensor) -> Tensor:
    """The lines that a program has written."""
    ended_N = times_N3[:, 2]
    return times_N3[ended_N > 0]


def span_of(times: list[Tensor]) -> tuple[int, int]:
    """The first begin and the last end."""
    used = torch.cat([used_lines(each) for each in times])
    return int(used[:, 0].min()), int(used[:, 2].max())
