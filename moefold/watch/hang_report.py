"""Report of a hang: which rank does not answer or is behind, where every rank stands, and the stacks of those that
answer. Written as JSON into the folder `hangs` of the run, read by `moefold doctor hang RUN`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from moefold.config.errors import UserError
from moefold.printable import printable_text

HANGS_FOLDER = "hangs"
LARGEST_REPORT = 64 << 20  # bytes
STOPPED = "is stopped (SIGSTOP)"
PROCESS_STATES = {
    "T": STOPPED,
    "t": "is held by a debugger",
    "Z": "has ended",
    "D": "waits for a disk or device",
}


@dataclass(frozen=True)
class RankState:
    """Where a rank stands, by its last heartbeat. `answers`: it has sent its stacks. `process`: what the system says of
    its process, where that is on the machine of the report."""

    rank: int
    host: str = ""
    pid: int = 0
    beat: int = 0
    step: int = -1
    place: str = ""
    seconds: float = 0.0
    site: str = ""
    collective: str = ""
    waits: bool = False
    answers: bool = False
    process: str = ""
    stacks: str = ""

    @property
    def was_heard(self) -> bool:
        return self.beat > 0

    def standing(self) -> str:
        """Where the rank stands, in words that are the same for ranks that stand together."""
        if not self.was_heard:
            return "was never heard of: it did not start, or not reach the place where ranks meet"
        where = f"{self.place} at {self.site}"
        last = f"; last collective: {self.collective}" if self.collective else ""
        heard = "" if self.answers else ", when last heard of"
        return f"{where}{heard}{last}"

    def trouble(self) -> str:
        """Why the rank is named."""
        if not self.was_heard:
            return f"rank {self.rank} was never heard of"
        process = f"process {self.pid} on {self.host}"
        if self.answers:
            return f"rank {self.rank} ({process}) is behind the others"
        state = f" {self.process}" if self.process else ""
        return f"rank {self.rank} does not answer ({process}{state})"


@dataclass(frozen=True)
class HangReport:
    when: str
    why: str
    named: list[int]
    ranks: list[RankState]

    def summary(self) -> str:
        """Who is named, and where all ranks stand; ranks that stand together share a line."""
        lines = [self.why]
        lines += [state.trouble() for state in self.ranks if state.rank in self.named]
        together: dict[str, list[int]] = {}
        for state in self.ranks:
            together.setdefault(state.standing(), []).append(state.rank)
        for standing, ranks in together.items():
            lines.append(f"  {rank_list(ranks)}: {standing}")
        return "\n".join(lines)


def name_ranks(ranks: Sequence[RankState]) -> list[int]:
    """The ranks that hold up the others: those that do not answer; else those at an earlier step; else those that do
    not wait for others. None where all wait."""
    silent = [state.rank for state in ranks if not state.answers]
    if silent:
        return silent
    last = max(state.step for state in ranks)
    behind = [state.rank for state in ranks if state.step < last]
    busy = [state.rank for state in ranks if not state.waits]
    if behind:
        return behind
    return busy if len(busy) < len(ranks) or len(ranks) == 1 else []


def make_report(why: str, ranks: Sequence[RankState]) -> HangReport:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return HangReport(when, why, name_ranks(ranks), list(ranks))


def rank_list(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    word = "rank" if texts and texts[0].isdecimal() and len(texts) == 1 else "ranks"
    return f"{word} {', '.join(texts)}"


def process_state(pid: int) -> str:
    """What the system says of a process of this machine, in words; empty for one that runs or waits."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "has ended" if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
    _, _, rest = status.rpartition(")")
    letter = rest.split()[0]
    return PROCESS_STATES.get(letter, "")


def is_stopped(pid: int) -> bool:
    return process_state(pid) == STOPPED


def write_report(report: HangReport, run_folder: Path) -> Path:
    folder = run_folder / HANGS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S.json")
    path = folder / name
    text = json.dumps(asdict(report), indent=1)
    path.write_text(text, encoding="utf-8")
    return path


def read_newest_report(run_folder: Path) -> HangReport:
    """The newest report of a run; a run without one is refused."""
    folder = run_folder / HANGS_FOLDER
    names = sorted(path for path in folder.glob("*.json") if path.is_file())
    if not names:
        raise UserError(f"no hang was recorded in {run_folder}; expected a run's folder with {HANGS_FOLDER}/*.json")
    path = names[-1]
    if path.stat().st_size > LARGEST_REPORT:
        raise UserError(f"{path} has more than {LARGEST_REPORT >> 20} MiB; expected the report of a hang")
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        return report_from_json(raw)
    except (ValueError, TypeError, KeyError, RecursionError, OSError) as error:
        reason = printable_text(str(error))
        raise UserError(f"{path} is no report of a hang: {reason}") from None


def report_from_json(raw: dict[str, Any]) -> HangReport:
    ranks = [state_from_json(entry) for entry in raw["ranks"]]
    named = [int(rank) for rank in raw["named"]]
    return HangReport(str(raw["when"]), str(raw["why"]), named, ranks)


def state_from_json(raw: dict[str, Any]) -> RankState:
    """A rank's state; every field has the type of its default."""
    values: dict[str, Any] = {"rank": int(raw["rank"])}
    for known in fields(RankState):
        if known.name == "rank" or known.name not in raw:
            continue
        kind = cast(type, type(known.default))
        values[known.name] = kind(raw[known.name])
    return RankState(**values)
