"""Heartbeat of a rank, and the alarm of all ranks: messages through a store that outlives any single rank.

The store is served by the launcher (`--nproc`), by torchrun's agent, or where there is neither by rank 0. A rank sends
two messages a beat, whatever the number of ranks: its position, and the question whether there is an alarm. The first
rank to raise one writes the report; all others send their stacks. An alarm comes from the limit of a phase
(watch/hang_watch.py), or from a neighbour that is stopped.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch.distributed as dist

from moefold.layout.environment import Rendezvous
from moefold.watch.call_sites import main_thread_site, waits_for_others
from moefold.watch.hang_report import RankState, process_state, state_from_json
from moefold.watch.neighbour import STOPPED_SECONDS, Neighbour
from moefold.watch.position import HERE
from moefold.watch.surroundings import launcher_check

BEAT_SECONDS = 0.3
ANSWER_SECONDS = 0.8  # that a rank of another machine has to send its stacks
LOCAL_ANSWER_SECONDS = 1.2  # of this machine, where the system says that its process is neither stopped nor gone
STORE_SECONDS = 2.0  # that the store has to answer an alarm
LEAST_PATIENCE = 0.5  # likewise, where it was silent before
REPORT_SECONDS = 4.0  # that the reporting rank has
LONGEST_STACKS = 200_000  # characters

StoreOpener = Callable[[Rendezvous], dist.Store]


class Heartbeat:
    """Beats of this rank in a thread of its own: a store that does not answer holds up nothing else."""

    def __init__(self, place: Rendezvous, open_store: StoreOpener, seconds_in_phase: Callable[[], float]):
        self.place = place
        self.open_store = open_store
        self.seconds_in_phase = seconds_in_phase
        self.host = socket.gethostname()
        self.neighbour = Neighbour(place, self.host)
        self.heard = time.monotonic()  # when the store last answered
        self.count = 0
        self.ended = threading.Event()  # the run is over
        self.alarm_raised = threading.Event()  # by any rank
        self.own_alarm: str | None = None  # why this rank raises one
        self.answered = threading.Event()  # the states of all ranks are gathered, or the report is written elsewhere
        self.published = threading.Event()  # the report of this rank is written
        self.states: list[RankState] | None = None  # of all ranks, on the rank that reports
        self.why = ""
        self.thread = threading.Thread(target=self.beat_until_alarm, daemon=True, name="heartbeat")

    def own_state(self) -> RankState:
        self.count += 1
        return state_of_this_rank(self.place.rank, self.count, self.seconds_in_phase())

    def beat_until_alarm(self) -> None:
        missing_launcher = launcher_check(os.environ)  # which serves the store
        try:
            store = self.open_store(self.place)
            read_state = partial(self.read_state, store)
            while not self.own_alarm and not store.check(["watch/alarm"]):
                self.send(store, "beat", self.own_state())
                self.heard = time.monotonic()
                trouble = self.neighbour.look(read_state)
                if trouble:
                    self.own_alarm = trouble
                    break
                is_over = self.ended.wait(STOPPED_SECONDS if self.neighbour.stopped else BEAT_SECONDS)
                if is_over or missing_launcher():
                    return
            self.answer_alarm(store)
        except RuntimeError:  # the store is gone
            return

    def await_answer(self) -> bool:
        """Wait until `answered`; whether it is. A store that has been silent, as behind a cut link, is given less
        time; once it has taken the alarm, the reporting rank has its own."""
        silent = time.monotonic() - self.heard
        patience = max(LEAST_PATIENCE, STORE_SECONDS - silent)
        if self.answered.wait(patience):
            return True
        return self.alarm_raised.is_set() and self.answered.wait(REPORT_SECONDS)

    def send(self, store: dist.Store, kind: str, state: RankState) -> None:
        fields = asdict(state)
        text = json.dumps(fields)
        store.set(f"watch/{kind}/{state.rank}", text)

    def answer_alarm(self, store: dist.Store) -> None:
        """Send the stacks of this rank; on the first rank that raised an alarm, gather those of all."""
        alarm = {"rank": self.place.rank, "why": self.own_alarm or ""}
        mine = json.dumps(alarm)
        raw = store.compare_set("watch/alarm", "", mine)
        first = json.loads(raw)
        self.why = first["why"]
        state = with_stacks(self.own_state())
        self.send(store, "answer", state)
        self.alarm_raised.set()
        if first["rank"] == self.place.rank:
            self.states = self.gather_states(store)
            self.answered.set()
            self.published.wait(STORE_SECONDS)
            store.set("watch/reported", "")
        else:
            store.wait(["watch/reported"])  # who ends before may take the reporting rank with it
            self.answered.set()

    def gather_states(self, store: dist.Store) -> list[RankState]:
        begun = time.monotonic()
        every = range(self.place.size)
        states = [RankState(rank) for rank in every]
        missing = set(every)
        while missing:
            for rank in sorted(missing):
                states[rank] = self.read_state(store, rank)
            self.heard = time.monotonic()
            waited = time.monotonic() - begun
            missing = {rank for rank in missing if self.may_still_answer(states[rank], waited)}
            time.sleep(0.02)
        return states

    def read_state(self, store: dist.Store, rank: int) -> RankState:
        for kind in ("answer", "beat"):
            name = f"watch/{kind}/{rank}"
            if store.check([name]):
                raw = store.get(name)
                state = state_from_json(json.loads(raw))
                if state.host != self.host:
                    return state
                return replace(state, process=process_state(state.pid))
        return RankState(rank)

    def may_still_answer(self, state: RankState, waited: float) -> bool:
        if state.answers or state.process:
            return False
        is_local = state.host == self.host
        return waited < (LOCAL_ANSWER_SECONDS if is_local else ANSWER_SECONDS)


def state_of_this_rank(rank: int, beat: int, seconds: float) -> RankState:
    return RankState(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        beat=beat,
        step=HERE.step,
        place=str(HERE),
        seconds=round(seconds, 1),
        site=main_thread_site(),
        collective=str(HERE.collective or ""),
        waits=waits_for_others(),
    )


def with_stacks(state: RankState) -> RankState:
    """The state with the Python stacks of all threads of this process. faulthandler reads no source files: disks may
    hang too."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read(LONGEST_STACKS)
    return replace(state, answers=True, stacks=stacks)
